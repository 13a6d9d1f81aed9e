"""This worker's end of the KV links: one per decode worker, made on demand, dead with its stream.

A link is a control stream (gRPC) beside a path for bytes (a kv_transfer Sender). The pusher takes
turns over the handoffs of the link, one piece at a time: the bytes are sent by the link's own
thread, then the header goes on the stream, so both arrive in the same order. The reader gives
decode's answers to the handoff that they name. What is said when is decided by
`kv_transfer.outbound`; this module only carries it.

Runs in the event loop; only `Sender.send` runs in the link's thread.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from core import link as say
from core.clock import Clock
from core.errors import PeerLost, TransferFailure, TwophaseError
from core.link import LinkDown, LinkUp, PieceId
from core.request import RequestId, WorkerName
from core.timeline import TransferReport
from core.worker import LinkStatus
from kv_link.counts import LinkCounts
from kv_link.pushes import Pushes
from kv_transfer.backend import Sender
from kv_transfer.meter import LinkMeter, piece_sizes
from kv_transfer.outbound import OutboundTransfer
from kv_transfer.plan import PieceSizes
from kv_transfer.reshape import Reshape
from twophase.peer import Duplex, lost


class Handoff:
    """One request's KV cache on its way over a link.

    `ended` is set once the source blocks are no longer read: sealed, or failed and fenced.
    """

    def __init__(self, transfer: OutboundTransfer, link: "Link") -> None:
        self.transfer = transfer
        self.pushes = Pushes(link.layout.block_size)
        self.ended = asyncio.Event()
        self._link = link
        self._tell_failure: Callable[[TwophaseError], None] | None = None

    def on_failure(self, tell: Callable[[TwophaseError], None]) -> None:
        """Have `tell` called, once, if the handoff fails; at once if it did."""
        self._tell_failure = tell
        self.tell_if_failed()

    def tell_if_failed(self) -> None:
        """Tell a failure that was not told yet."""
        if self.transfer.failure is not None and self._tell_failure is not None:
            self._tell_failure(self.transfer.failure)
            self._tell_failure = None

    def computed(
        self, num_tokens: int, block_ids: tuple[int, ...], first_token_id: int | None = None
    ) -> None:
        """Push the KV cache of the prompt's first `num_tokens` tokens, which lies in `block_ids`.

        first_token_id comes with the prompt's end.
        """
        now_s = self._link.clock.now_s()
        self._link.say(self.transfer.computed(num_tokens, block_ids, now_s, first_token_id))
        self._link.changed(self)

    def layers_computed(self, num_tokens: int, num_layers: int, block_ids: tuple[int, ...]) -> None:
        """Push what a step has ready while it computes its later layers."""
        self.transfer.layers_computed(num_tokens, num_layers, block_ids)
        self._link.changed(self)

    async def sealed(self) -> TransferReport:
        """What was measured, once decode proved every byte; raises TransferFailed if it did not."""
        await self.ended.wait()
        if self.transfer.failure is not None:
            raise self.transfer.failure
        report = self.transfer.report()
        return replace(report, events=(*self.pushes.all(), *report.events))

    async def close(self) -> None:
        """End the handoff if it is not sealed; returns when the source blocks are free.

        Contract: idempotent; may block for one `Sender.send`.
        """
        detail = "the sender gave the request up"
        self._link.say(self.transfer.abort(TransferFailure.ABORTED, detail))
        self._link.changed(self)
        await self.ended.wait()


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One link: bytes that decode has not acknowledged, what it carried, and carries when busy."""

    num_in_flight_bytes: int
    bytes_per_s: float | None
    max_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes go over a link: the backend's sender, what pages our blocks are for it, a count."""

    sender: Sender
    reshape: Reshape
    counts: LinkCounts


class Link:
    """One connected link.

    Invariant: a handoff is in `_handoffs` until decode cannot mention it any more (it ended and
    the stream still lives, or the link is dead).
    """

    def __init__(
        self,
        opened: say.LinkOpened,
        way: Way,
        stream: Duplex[LinkUp, LinkDown],
        messages: AsyncIterator[LinkDown],
        *,
        peer_name: WorkerName,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.peer_name = peer_name
        self.num_bytes = 0
        self.is_usable = True
        self.last_used_s = clock.now_s()
        self.layout = opened.layout
        self._opened = opened
        self._reshape = way.reshape
        self._sender = way.sender
        self._counts = way.counts
        self._stream = stream
        self._messages = messages
        self._meter = LinkMeter()
        self._log = logging.getLogger("twophase.kv_link")
        self._handoffs: dict[tuple[RequestId, int], Handoff] = {}
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"link-{peer_name}")

    @property
    def status(self) -> LinkStatus:
        """What an operator sees of the link."""
        speed = self._meter.speed
        return LinkStatus(
            self.peer_name,
            self._opened.kind,
            self._opened.reason,
            self.num_bytes,
            speed.latency_s,
            speed.bytes_per_s,
        )

    def load(self, now_s: float) -> LinkLoad:
        """What the link carries, for those who scale pools."""
        return LinkLoad(
            sum(handoff.transfer.num_in_flight_bytes for handoff in self._handoffs.values()),
            self._meter.carried_per_s(now_s),
            self._meter.speed.bytes_per_s,
        )

    def piece_sizes(self, most: int) -> PieceSizes:
        """Bounds of a piece: `most` or what the backend takes, and what is worth a round trip."""
        return piece_sizes(self._meter.speed, min(most, self._sender.max_piece_bytes))

    @property
    def num_open_transfers(self) -> int:
        """Handoffs that have not ended."""
        return len(self._handoffs)

    def begin(self, transfer: OutboundTransfer) -> Handoff:
        """Ask decode for the right to write; compute may go on meanwhile."""
        handoff = Handoff(transfer, self)
        self.last_used_s = self.clock.now_s()
        if not self.is_usable:
            transfer.link_lost(f"the link to {self.peer_name} is dead")
            handoff.ended.set()
            return handoff
        reservation = transfer.reservation
        self._handoffs[reservation.request_id, reservation.epoch] = handoff
        self.say(transfer.begin())
        return handoff

    def say(self, messages: tuple[LinkUp, ...]) -> None:
        """Put messages on the control stream, in order."""
        for message in messages:
            self._stream.send(message)

    def changed(self, handoff: Handoff) -> None:
        """A handoff may have something to push, or may have failed or ended."""
        handoff.tell_if_failed()
        if handoff.transfer.try_release_blocks():
            reservation = handoff.transfer.reservation
            self._handoffs.pop((reservation.request_id, reservation.epoch), None)
            handoff.ended.set()
            if handoff.transfer.failure is None:
                report = handoff.transfer.report()
                self.num_bytes += report.num_bytes
                self._counts.sealed(report)
        self._work.set()

    async def run(self) -> None:
        """Carry handoffs until the stream ends; then every handoff of the link has failed."""
        error: TwophaseError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._push())
                try:
                    async for message in self._messages:
                        self._hear(message)
                except TwophaseError as caught:
                    error = caught
                finally:
                    self.is_usable = False
                    self._work.set()
        finally:
            try:
                # To unmap the cache of a worker that died frees it, which takes 0.1 s for 1 GiB:
                # the loop takes requests meanwhile.
                await asyncio.to_thread(self._sender.close)
            finally:
                self._end(lost(self.peer_name, error))
                error = None  # its traceback holds this frame: see twophase.peer

    def close(self) -> None:
        """End the stream, and with it the link; idempotent."""
        self.is_usable = False
        self._work.set()
        self._stream.close()

    def tick(self) -> None:
        """Let time pass: a handoff whose deadline is over ends."""
        for handoff in list(self._handoffs.values()):
            self.say(handoff.transfer.tick(self.clock.now_s()))
            self.changed(handoff)

    def _hear(self, message: LinkDown) -> None:
        if isinstance(message, say.LinkOpened | say.LinkRefused):
            return
        if isinstance(message, say.PieceAck):
            piece_id = PieceId(message.epoch, message.index)
            self._sender.acknowledge(piece_id)
            self._meter.acknowledged(piece_id, self.clock.now_s())
        handoff = self._handoffs.get((message.request_id, message.epoch))
        if handoff is not None:
            self._answer(handoff, message)
            self.changed(handoff)
            return
        self._work.set()
        # It ended here; decode still has to be told that nobody writes any more.
        if isinstance(message, say.Abort):
            self.say((say.AbortAck(message.request_id, message.epoch),))

    def _answer(self, handoff: Handoff, message: LinkDown) -> None:
        transfer = handoff.transfer
        match message:
            case say.Granted():
                self.say(transfer.granted())
            case say.PieceAck():
                transfer.acknowledged(message.index)
                handoff.pushes.acknowledged(message.index, self.clock.now_s())
            case say.Sealed():
                transfer.sealed(self.clock.now_s())
            case say.TransferRefused():
                transfer.refused(message.reason, message.detail)
            case say.Abort():
                self.say(transfer.peer_aborted(message.reason, message.detail))

    async def _push(self) -> None:
        while self.is_usable:
            await self._work.wait()
            self._work.clear()
            for handoff in list(self._handoffs.values()):
                if self._sender.has_room() and self.is_usable:
                    await self._push_piece(handoff)

    async def _push_piece(self, handoff: Handoff) -> None:
        started_s = self.clock.now_s()
        piece = handoff.transfer.next_piece(started_s)
        if piece is None:
            return
        try:
            checksum = await asyncio.get_running_loop().run_in_executor(
                self._thread,
                self._sender.send,
                piece.piece_id,
                self._reshape.span(piece.span),
                self._reshape.source_pages(piece.span, piece.source_block_ids),
                self._reshape.target_pages(piece.target_block_ids),
            )
        except Exception as error:  # root of the link's thread: whatever it was, the link is lost
            if not isinstance(error, PeerLost):
                self._log.exception("a piece could not be sent to %s", self.peer_name)
            handoff.transfer.send_failed(str(error))
            self.changed(handoff)
            self.close()
            return
        messages = handoff.transfer.sent(checksum)
        for message in messages:
            if isinstance(message, say.Piece):
                self._meter.sent(message.piece_id, message.num_bytes, started_s)
                handoff.pushes.sent(message, started_s)
        self.say(messages)
        self.changed(handoff)

    def _end(self, error: PeerLost) -> None:
        self._stream.close()
        self._sender.close()
        self._thread.shutdown()
        for handoff in list(self._handoffs.values()):
            handoff.transfer.link_lost(str(error))
            self.changed(handoff)
