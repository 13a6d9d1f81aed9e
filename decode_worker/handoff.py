"""The receiving side of KV handoffs: which reservation each link writes into, and until when.

Holds one `InboundTransfer` per reservation that waits for its KV cache, and the links that write.
A transfer stays here until its blocks are decided: sealed (the sequence has them) or closed (the
writer is fenced, the pool may have them back). While a link is lost but its writer may live, the
blocks of its transfers stay in quarantine.

Pure bookkeeping in the event loop's thread; bytes are taken by the links' own threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

from core.errors import TransferFailed, TransferFailure
from core.layout import KVLayout
from core.link import (
    Abort,
    AbortAck,
    Begin,
    LinkDown,
    LinkUp,
    Piece,
    PieceAck,
    Seal,
    TransferRefused,
)
from core.request import RequestId
from kv_transfer.backend import Receiver
from kv_transfer.inbound import Arrival, InboundState, InboundTransfer
from kv_transfer.plan import Reservation


@dataclass(frozen=True, slots=True)
class Proven:
    """Every byte of the prompt's KV cache is proven; decode goes on after first_token_id."""

    request_id: RequestId
    first_token_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The handoff failed; its blocks follow in a Closed once the writer is fenced."""

    request_id: RequestId
    epoch: int
    error: TransferFailed


@dataclass(frozen=True, slots=True)
class Closed:
    """Nobody can write into the blocks of that epoch any more."""

    request_id: RequestId
    epoch: int


Outcome = Proven | Failed | Closed


@dataclass(slots=True)
class _Inbound:
    transfer: InboundTransfer
    link_id: str | None = None
    is_failure_told: bool = False


@dataclass(slots=True)
class _Link:
    receiver: Receiver
    say: Callable[[LinkDown], None]
    drop: Callable[[], None]
    is_lost: bool = False


class Handoffs:
    """All handoffs towards this worker that are not decided.

    Invariants: a transfer is here from `open` until it is sealed or closed; a link that wrote
    into a transfer stays known until that transfer is decided, even after its stream ended.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._inbound: dict[tuple[RequestId, int], _Inbound] = {}
        self._links: dict[str, _Link] = {}
        self._outcomes: list[Outcome] = []

    @property
    def num_open(self) -> int:
        """Handoffs that are not decided."""
        return len(self._inbound)

    def quarantine_age_s(self, now_s: float) -> float:
        """How long the handoff that failed first waits for its writer to be fenced; 0 without."""
        return max(
            (i.transfer.quarantine_age_s(now_s) for i in self._inbound.values()), default=0.0
        )

    def open(self, reservation: Reservation, lease_until_s: float) -> None:
        """Expect the KV cache of a reservation until the end of its lease."""
        transfer = InboundTransfer(reservation, layout=self._layout, lease_until_s=lease_until_s)
        self._inbound[reservation.request_id, reservation.epoch] = _Inbound(transfer)

    def add_link(
        self,
        link_id: str,
        receiver: Receiver,
        *,
        say: Callable[[LinkDown], None],
        drop: Callable[[], None],
    ) -> None:
        """A link was opened; `say` reaches its sender, `drop` ends its stream."""
        self._links[link_id] = _Link(receiver, say, drop)

    def lose_link(self, link_id: str, detail: str, now_s: float) -> None:
        """The link's stream ended: what it was writing has failed."""
        self._links[link_id].is_lost = True
        for inbound in self._of_link(link_id):
            inbound.transfer.abort(TransferFailure.LINK_LOST, detail, now_s)
        self._settle(now_s)

    def hear(self, link_id: str, message: LinkUp, now_s: float) -> None:
        """A message of the link's sender, except OpenLink and Piece."""
        match message:
            case Begin():
                self._begin(link_id, message, now_s)
            case Seal():
                self._seal(link_id, message, now_s)
            case Abort():
                inbound = self._find(link_id, message.request_id, message.epoch)
                if inbound is None:
                    self._say(link_id, (AbortAck(message.request_id, message.epoch),))
                else:
                    self._say(
                        link_id,
                        inbound.transfer.peer_aborted(message.reason, message.detail, now_s),
                    )
            case AbortAck():
                inbound = self._find(link_id, message.request_id, message.epoch)
                if inbound is not None:
                    inbound.transfer.fence()
        self._settle(now_s)

    def arrive(self, link_id: str, piece: Piece, now_s: float) -> Arrival:
        """Where the bytes of an announced piece go; it is completed with `landed`."""
        inbound = self._find(link_id, piece.request_id, piece.epoch)
        if inbound is None:
            return Arrival(None, "its handoff is over")
        arrival = inbound.transfer.arrive(piece, now_s)
        self._say(link_id, arrival.messages)
        return arrival

    def landed(self, link_id: str, piece: Piece, checksum: int, now_s: float) -> None:
        """The link's thread took the piece off the link."""
        inbound = self._find(link_id, piece.request_id, piece.epoch)
        if inbound is None:
            self._say(link_id, (PieceAck(piece.request_id, piece.epoch, piece.index),))
        else:
            self._say(link_id, inbound.transfer.landed(piece, checksum, now_s))
        self._settle(now_s)

    def take_failed(self, link_id: str, piece: Piece, detail: str, now_s: float) -> None:
        """The link's thread could not take the piece: the link is lost."""
        inbound = self._find(link_id, piece.request_id, piece.epoch)
        if inbound is not None:
            self._say(link_id, inbound.transfer.take_failed(detail, now_s))
        self._settle(now_s)

    def abort(
        self, request_id: RequestId, epoch: int, reason: TransferFailure, now_s: float
    ) -> None:
        """Give a handoff up from this side; nothing happens if it is decided."""
        inbound = self._inbound.get((request_id, epoch))
        if inbound is None:
            return
        inbound.is_failure_told = True
        messages = inbound.transfer.abort(reason, "decode gave the request up", now_s)
        if inbound.link_id is not None:
            self._say(inbound.link_id, messages)
        self._settle(now_s)

    def tick(self, now_s: float) -> None:
        """Let time pass: leases end, unanswered aborts drop their link, dead writers are fenced."""
        for inbound in list(self._inbound.values()):
            messages = inbound.transfer.tick(now_s)
            if inbound.link_id is None:
                continue
            self._say(inbound.link_id, messages)
            if inbound.transfer.is_fence_overdue(now_s):
                self._links[inbound.link_id].drop()
        self._settle(now_s)

    def take_outcomes(self) -> list[Outcome]:
        """What was decided since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _begin(self, link_id: str, message: Begin, now_s: float) -> None:
        inbound = self._inbound.get((message.request_id, message.epoch))
        if inbound is None or inbound.link_id is not None:
            self._say(link_id, (_unknown(message),))
            return
        inbound.link_id = link_id
        self._say(link_id, inbound.transfer.begin(now_s))

    def _seal(self, link_id: str, message: Seal, now_s: float) -> None:
        inbound = self._find(link_id, message.request_id, message.epoch)
        if inbound is None:
            self._say(link_id, (_unknown(message),))
            return
        self._say(link_id, inbound.transfer.seal(message.num_pieces, now_s))
        if inbound.transfer.state is InboundState.SEALED:
            self._outcomes.append(Proven(message.request_id, message.first_token_id))

    def _settle(self, now_s: float) -> None:
        """Fence writers that are gone; tell failures and ends; forget what is decided."""
        for (request_id, epoch), inbound in list(self._inbound.items()):
            transfer = inbound.transfer
            if transfer.state is InboundState.ABORTING and self._is_writer_gone(inbound):
                transfer.fence()
            if transfer.failure is not None and not inbound.is_failure_told:
                inbound.is_failure_told = True
                self._outcomes.append(Failed(request_id, epoch, transfer.failure))
            if transfer.state is InboundState.SEALED:
                del self._inbound[request_id, epoch]
            elif transfer.try_release_blocks() is not None:
                del self._inbound[request_id, epoch]
                self._outcomes.append(Closed(request_id, epoch))
        self._forget_links()

    def _is_writer_gone(self, inbound: _Inbound) -> bool:
        if inbound.link_id is None:
            return True
        link = self._links[inbound.link_id]
        return link.is_lost and link.receiver.is_writer_gone()

    def _forget_links(self) -> None:
        in_use = {inbound.link_id for inbound in self._inbound.values()}
        for link_id, link in list(self._links.items()):
            if link.is_lost and link_id not in in_use:
                del self._links[link_id]

    def _find(self, link_id: str, request_id: RequestId, epoch: int) -> _Inbound | None:
        inbound = self._inbound.get((request_id, epoch))
        return inbound if inbound is not None and inbound.link_id == link_id else None

    def _of_link(self, link_id: str) -> list[_Inbound]:
        return [inbound for inbound in self._inbound.values() if inbound.link_id == link_id]

    def _say(self, link_id: str, messages: tuple[LinkDown, ...]) -> None:
        link = self._links[link_id]
        for message in messages if not link.is_lost else ():
            link.say(message)


def _unknown(message: Begin | Seal) -> TransferRefused:
    return TransferRefused(
        message.request_id,
        message.epoch,
        TransferFailure.STALE_EPOCH,
        f"epoch {message.epoch} of request {message.request_id} expects no KV cache",
    )
