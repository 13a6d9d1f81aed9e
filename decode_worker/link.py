"""This worker's end of the KV links: checks who asks, makes the offer, takes the bytes.

One coroutine per link reads the control stream in order; each announced piece is taken by the
link's own thread before the next message is read, so bytes and headers cannot get out of step.
What a piece may write, and what a message means, is decided by `handoff`.

Runs in the event loop; only `Receiver.accept` and `Receiver.take` run in the link's thread.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from core.clock import Clock
from core.config import TransferConfig
from core.errors import ConfigError, PeerLost, TwophaseError
from core.link import LinkDown, LinkOpened, LinkRefused, LinkUp, OpenLink, Piece
from core.worker import LinkStatus, WorkerInfo
from decode_worker.worker import DecodeWorker
from kv_transfer.backend import (
    BackendKind,
    Choice,
    Endpoint,
    Offer,
    Receiver,
    ReceiverBackend,
    choose_backend,
)
from kv_transfer.connection import local_endpoint
from kv_transfer.pages import view_as_pages
from kv_transfer.reshape import CacheShape, Reshape, require_reshapable

# One piece may be spoilt; two in a row of two handoffs mean that bytes and headers are out of step.
MAX_WRONG_PIECES = 2

Say = Callable[[LinkDown], None]


@dataclass(slots=True)
class _Link:
    link_id: str
    opened_by: OpenLink
    choice: Choice
    receiver: Receiver
    thread: ThreadPoolExecutor
    reshape: Reshape
    num_bytes: int = 0
    num_wrong_pieces: int = 0


class _Drop:
    """Ends the coroutine of a link from outside it, so that its stream can still end in order."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._is_ordered = False

    def __call__(self) -> None:
        """Idempotent."""
        if not self._is_ordered:
            self._is_ordered = True
            self._task.cancel()

    def was_all(self) -> bool:
        """Whether a cancel that just came was this and nobody else's; it is forgotten then."""
        return self._is_ordered and self._task.uncancel() == 0


class LinkServer:
    """The links into one worker's cache."""

    def __init__(
        self,
        info: WorkerInfo,
        worker: DecodeWorker,
        cache_L2NSKD: torch.Tensor,
        backends: dict[BackendKind, ReceiverBackend],
        *,
        config: TransferConfig,
        clock: Clock,
    ) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.num_bytes = 0
        self._info = info
        self._worker = worker
        self._cache_L2NSKD = cache_L2NSKD
        self._backends = backends
        self._config = config
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._log = logging.getLogger("twophase.decode_worker")

    @property
    def statuses(self) -> tuple[LinkStatus, ...]:
        """What an operator sees of each link."""
        return tuple(
            LinkStatus(
                link.opened_by.prefill_worker, link.choice.kind, link.choice.why, link.num_bytes
            )
            for link in self._links.values()
        )

    async def serve(self, messages: AsyncIterator[LinkUp], say: Say) -> None:
        """Carry one link from its OpenLink to the end of its stream."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                opening = await anext(messages, None)
        except TimeoutError:
            opening = None
        if not isinstance(opening, OpenLink):
            say(LinkRefused(PeerLost("prefill", "its link did not begin with an OpenLink in time")))
            return
        try:
            link, offer = self._open(opening)
        except TwophaseError as error:
            self._log.warning("refused a link from %s: %s", opening.prefill_worker, error)
            say(LinkRefused(error))
            return
        say(
            LinkOpened(
                kind=link.choice.kind,
                reason=link.choice.why,
                parameters=tuple(sorted(offer.parameters.items())),
                layout=self._info.layout,
                num_blocks=self._info.num_blocks,
            )
        )
        detail = "its stream ended"
        self._links[link.link_id] = link
        drop = _Drop()
        self._worker.handoffs.add_link(link.link_id, link.receiver, say=say, drop=drop)
        try:
            await self._in_thread(
                link, lambda: link.receiver.accept(self._config.connect_timeout_s)
            )
            await self._read(link, messages)
        except PeerLost as error:
            detail = str(error)
        except asyncio.CancelledError:
            # A handler that ends as cancelled tells the caller nothing: it would wait for ever.
            if not drop.was_all():
                raise
            detail = "it was dropped: an Abort was left unanswered"
        finally:
            self._close(link, detail)

    def _open(self, opening: OpenLink) -> tuple[_Link, Offer]:
        if opening.decode_incarnation != self._info.incarnation:
            raise PeerLost(self._info.name, f"{opening.decode_incarnation} is not running any more")
        require_reshapable(
            opening.layout, self._info.layout, may_convert_dtype=self._config.convert_dtype
        )
        choice = choose_backend(
            self._config.backend,
            prefill=_endpoint_of(opening),
            decode=replace(
                local_endpoint(self._cache_L2NSKD), has_nixl=BackendKind.NIXL in self._backends
            ),
        )
        if opening.backend != self._config.backend:
            raise ConfigError(
                "transfer.backend",
                f"is {opening.backend} at {opening.prefill_worker} "
                f"and {self._config.backend} at {self._info.name}",
            )
        self._refuse_unreachable_ranks(opening, choice)
        link_id = uuid.uuid4().hex
        # Only the target's blocks are looked up here.
        reshape = Reshape(
            CacheShape(opening.layout, 0), CacheShape(self._info.layout, self._info.num_blocks)
        )
        pages = view_as_pages(self._cache_L2NSKD, reshape.page.num_per_block(self._info.layout))
        offer, receiver = self._backends[choice.kind].offer(link_id, pages)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"link-{opening.prefill_worker}")
        return _Link(link_id, opening, choice, receiver, thread, reshape), offer

    def _refuse_unreachable_ranks(self, opening: OpenLink, choice: Choice) -> None:
        """Where not all ranks' caches lie in one memory, only rank 0's is reached."""
        sizes = (opening.layout.tensor_parallel_size, self._info.layout.tensor_parallel_size)
        is_on_card = self._cache_L2NSKD.device.type != "cpu"
        if sizes != (1, 1) and (is_on_card or choice.kind is BackendKind.NIXL):
            where = " on cards" if is_on_card else ""
            raise ConfigError(
                "transfer.backend",
                f"{choice.kind}{where} reaches only rank 0's cache; there are {sizes[0]} ranks at "
                f"{opening.prefill_worker} and {sizes[1]} at {self._info.name}",
                None if is_on_card else "torch",
            )

    async def _read(self, link: _Link, messages: AsyncIterator[LinkUp]) -> None:
        async for message in messages:
            if isinstance(message, Piece):
                await self._take(link, message)
            else:
                self._worker.handoffs.hear(link.link_id, message, self._clock.now_s())
            self._worker.settle(self._clock.now_s())
            self.changed()

    async def _take(self, link: _Link, piece: Piece) -> None:
        handoffs = self._worker.handoffs
        arrival = handoffs.arrive(link.link_id, piece, self._clock.now_s())
        targets = arrival.target_block_ids
        if targets is None:
            self._log.info("piece %d of %s: %s", piece.index, piece.request_id, arrival.refusal)
        pages = link.reshape.target_pages(targets) if targets is not None else None
        taken = link.thread.submit(link.receiver.take, link.reshape.span(piece.span), pages)
        try:
            await _until_done(taken)
        finally:
            self._taken(link, piece, taken)
        checksum = taken.result()
        if targets is not None:
            self._require_in_step(link, is_wrong=checksum != piece.checksum)

    def _taken(self, link: _Link, piece: Piece, taken: Future[int]) -> None:
        handoffs, now_s = self._worker.handoffs, self._clock.now_s()
        error = taken.exception()
        if error is not None:
            handoffs.take_failed(link.link_id, piece, str(error), now_s)
            return
        link.num_bytes += piece.num_bytes
        self.num_bytes += piece.num_bytes
        handoffs.landed(link.link_id, piece, taken.result(), now_s)

    def _require_in_step(self, link: _Link, *, is_wrong: bool) -> None:
        """End a link on which every further piece would be taken for the one before it."""
        link.num_wrong_pieces = link.num_wrong_pieces + 1 if is_wrong else 0
        if link.num_wrong_pieces >= MAX_WRONG_PIECES:
            why = f"{MAX_WRONG_PIECES} pieces in a row came with wrong bytes"
            raise PeerLost(link.opened_by.prefill_worker, why)

    async def _in_thread(self, link: _Link, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(link.thread, call)

    def _close(self, link: _Link, detail: str) -> None:
        del self._links[link.link_id]
        link.receiver.close()
        link.thread.shutdown(wait=False)
        now_s = self._clock.now_s()
        self._worker.handoffs.lose_link(link.link_id, detail, now_s)
        self._worker.settle(now_s)
        self.changed()
        self._log.info("link from %s closed: %s", link.opened_by.prefill_worker, detail)


def _endpoint_of(opening: OpenLink) -> Endpoint:
    return Endpoint(
        host_id=opening.host_id,
        device=opening.device,
        has_nixl=opening.has_nixl,
        has_rdma=opening.has_rdma,
        card=opening.card,
        reachable_cards=opening.reachable_cards,
    )


async def _until_done(future: Future[int]) -> None:
    """Return when `future` is done; a cancel meanwhile takes effect then.

    A link that is being dropped has to wait, too: until its thread has returned it may write.
    """
    is_cancelled = False
    waiting = asyncio.wrap_future(future)
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            is_cancelled = True
    waiting.exception()  # read here, or asyncio logs it as never retrieved
    if is_cancelled:
        raise asyncio.CancelledError
