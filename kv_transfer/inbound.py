"""One handoff as the decode worker sees it: what counts as proven, and when blocks are free.

Pure: facts and `now_s` in, messages and decisions out; knows neither bytes nor streams. Each
method returns the messages to put on the link's control stream, in order. Not thread-safe:
the decode worker calls it in its event loop.

1. The reservation is made: RESERVED. No prefill worker may write yet.
2. `begin` grants the write: RECEIVING.
3. `arrive` says where the next piece may go, the link thread takes it, `landed` checks it.
4. `seal` proves that every layer of every shipped block came exactly once: SEALED.
5. Anything else ends in ABORTING until the writer is fenced, then in CLOSED.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from core.errors import TransferFailed, TransferFailure
from core.layout import KVLayout
from core.link import Abort, AbortAck, Granted, LinkDown, Piece, PieceAck, Sealed
from core.link import TransferRefused as Refused
from kv_transfer.plan import Reservation, span_bytes

FENCE_TIMEOUT_S = 5.0


class InboundState(Enum):
    """Where a handoff stands at the decode worker.

    ::

        RESERVED --begin--> RECEIVING --seal, all proven--> SEALED
            |                |     |
            |                |     +--seal, not all proven--+
            |                |                              |
            |       abort, lease over, bad piece,           |
            |       link lost                               |
            |                v                              v
            |            ABORTING --writer fenced, no piece in hand--> CLOSED
            |                                                            ^
            +--abort, lease over-----------------------------------------+

    SEALED and CLOSED are final. Blocks: RESERVED and RECEIVING, the reservation; ABORTING,
    quarantined; SEALED, the sequence; CLOSED, given back once by `try_release_blocks`.
    The writer is fenced by its Seal, its Abort, its AbortAck, or by proof that it is gone.
    """

    RESERVED = "reserved"
    RECEIVING = "receiving"
    SEALED = "sealed"
    ABORTING = "aborting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the link thread completes an announced piece.

    target_block_ids are the cache blocks that take it; None: take it off the link and throw it
    away, for the reason in `refusal`. `messages` are to be sent at once.
    """

    target_block_ids: tuple[int, ...] | None
    refusal: str = ""
    messages: tuple[LinkDown, ...] = ()


class InboundTransfer:
    """The decode worker's record of one handoff.

    Invariants: SEALED only if each layer of each shipped block was covered by exactly one piece
    whose checksum agreed; blocks are released at most once, never before the writer is fenced
    and never while a piece is in hand.
    """

    def __init__(self, reservation: Reservation, *, layout: KVLayout, lease_until_s: float) -> None:
        self.reservation = reservation
        self.state = InboundState.RESERVED
        self.failure: TransferFailed | None = None
        self._layout = layout
        self._shipped = reservation.shipped_blocks(layout)
        self._lease_until_s = lease_until_s
        self._failed_s = lease_until_s
        self._claimed_LB = np.zeros((layout.num_layers, len(self._shipped)), dtype=np.bool_)
        self._num_arrived = 0
        self._in_hand: Piece | None = None
        self._is_writer_fenced = True
        self._are_blocks_released = False

    @property
    def due_s(self) -> float | None:
        """When `tick` has to be called; None once the state is final."""
        match self.state:
            case InboundState.RESERVED | InboundState.RECEIVING:
                return self._lease_until_s
            case InboundState.ABORTING:
                return self._failed_s + FENCE_TIMEOUT_S
            case InboundState.SEALED | InboundState.CLOSED:
                return None

    def begin(self, now_s: float) -> tuple[LinkDown, ...]:
        """Let the prefill worker write, or refuse a second or late Begin."""
        self.tick(now_s)
        if self.state is not InboundState.RESERVED:
            return (self._refused(TransferFailure.STALE_EPOCH, f"it is {self.state.value}"),)
        self.state = InboundState.RECEIVING
        self._is_writer_fenced = False
        return (Granted(self.reservation.request_id, self.reservation.epoch),)

    def arrive(self, piece: Piece, now_s: float) -> Arrival:
        """Where an announced piece goes; a piece that breaks the protocol ends the handoff.

        The caller completes it with `landed` or `take_failed` in either case.
        """
        messages = self.tick(now_s)
        if self.state is not InboundState.RECEIVING:
            return Arrival(None, f"the handoff is {self.state.value}", messages)
        problem = self._problem(piece)
        if problem:
            return Arrival(None, problem, self._fail(TransferFailure.REFUSED, problem, now_s))
        self._claim(piece)
        self._in_hand = piece
        block_ids = self.reservation.block_ids
        return Arrival(tuple(block_ids[block] for block in piece.span.blocks))

    def landed(self, piece: Piece, checksum: int, now_s: float) -> tuple[LinkDown, ...]:
        """The link thread is done with `piece`, whose bytes have `checksum`."""
        messages: tuple[LinkDown, ...] = (PieceAck(piece.request_id, piece.epoch, piece.index),)
        was_in_hand = self._in_hand == piece
        if was_in_hand:
            self._in_hand = None
        if was_in_hand and checksum != piece.checksum:
            detail = f"piece {piece.index} came as {checksum:016x}, sent as {piece.checksum:016x}"
            messages += self._fail(TransferFailure.CHECKSUM, detail, now_s)
        self._settle()
        return messages

    def take_failed(self, detail: str, now_s: float) -> tuple[LinkDown, ...]:
        """The backend could not complete the piece in hand: the link is lost."""
        self._in_hand = None
        messages = self._fail(TransferFailure.LINK_LOST, detail, now_s)
        self._settle()
        return messages

    def seal(self, num_pieces: int, now_s: float) -> tuple[LinkDown, ...]:
        """Prefill says that it sent all and stopped writing: proven, or refused."""
        self.tick(now_s)
        self._is_writer_fenced = True
        if self.state is not InboundState.RECEIVING:
            self._settle()
            reason = self.failure.reason if self.failure else TransferFailure.STALE_EPOCH
            return (self._refused(reason, f"the handoff is {self.state.value}"),)
        if self._in_hand or num_pieces != self._num_arrived or not self._claimed_LB.all():
            return (self._refuse_seal(num_pieces, now_s),)
        self.state = InboundState.SEALED
        return (Sealed(self.reservation.request_id, self.reservation.epoch),)

    def abort(self, reason: TransferFailure, detail: str, now_s: float) -> tuple[LinkDown, ...]:
        """End the handoff from this side; idempotent, and without effect once sealed."""
        messages = self._fail(reason, detail, now_s)
        self._settle()
        return messages

    def peer_aborted(
        self, reason: TransferFailure, detail: str, now_s: float
    ) -> tuple[LinkDown, ...]:
        """Prefill ended the handoff, and by that promised not to write any more."""
        self._is_writer_fenced = True
        self._fail(reason, detail, now_s)
        self._settle()
        return (AbortAck(self.reservation.request_id, self.reservation.epoch),)

    def fence(self) -> None:
        """The writer acknowledged the Abort, or is proven gone; idempotent."""
        self._is_writer_fenced = True
        self._settle()

    def tick(self, now_s: float) -> tuple[LinkDown, ...]:
        """Let time pass: an expired lease ends a handoff that is not sealed."""
        if self.state not in (InboundState.RESERVED, InboundState.RECEIVING):
            return ()
        if now_s < self._lease_until_s:
            return ()
        messages = self._fail(TransferFailure.LEASE_EXPIRED, "its lease is over", now_s)
        self._settle()
        return messages

    def is_fence_overdue(self, now_s: float) -> bool:
        """True if the writer left an Abort unanswered too long: the link has to be dropped."""
        return self.state is InboundState.ABORTING and now_s >= self._failed_s + FENCE_TIMEOUT_S

    def quarantine_age_s(self, now_s: float) -> float:
        """Since when the blocks wait for the writer to be fenced; 0 if they do not."""
        return now_s - self._failed_s if self.state is InboundState.ABORTING else 0.0

    def try_release_blocks(self) -> tuple[int, ...] | None:
        """The reservation's blocks, for the pool, on the first call in CLOSED; else None."""
        if self.state is not InboundState.CLOSED or self._are_blocks_released:
            return None
        self._are_blocks_released = True
        return self.reservation.block_ids

    def _problem(self, piece: Piece) -> str:
        """Why the piece cannot be taken, in words; empty if it can."""
        span, reservation = piece.span, self.reservation
        if (piece.request_id, piece.epoch) != (reservation.request_id, reservation.epoch):
            return f"piece of {piece.request_id} epoch {piece.epoch} in another handoff"
        if self._in_hand is not None:
            return f"piece {self._in_hand.index} is still in hand"
        if piece.index != self._num_arrived:
            return f"piece {piece.index} came where {self._num_arrived} was next"
        if not self._is_inside(piece):
            return f"piece {piece.index} lies outside the reservation: {span}"
        if piece.num_bytes != span_bytes(self._layout, span):
            return f"piece {piece.index} says {piece.num_bytes} bytes for {span}"
        if self._claims_of(piece).any():
            return f"piece {piece.index} covers what another piece covered"
        return ""

    def _is_inside(self, piece: Piece) -> bool:
        span = piece.span
        return (
            span.num_layers > 0
            and span.num_blocks > 0
            and 0 <= span.first_layer
            and span.layers.stop <= self._layout.num_layers
            and self._shipped.start <= span.first_block
            and span.blocks.stop <= self._shipped.stop
        )

    def _claims_of(self, piece: Piece) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        layers, blocks = piece.span.layers, piece.span.blocks
        start = self._shipped.start
        return self._claimed_LB[
            layers.start : layers.stop, blocks.start - start : blocks.stop - start
        ]

    def _claim(self, piece: Piece) -> None:
        self._claims_of(piece)[:] = True
        self._num_arrived += 1

    def _fail(self, reason: TransferFailure, detail: str, now_s: float) -> tuple[LinkDown, ...]:
        """Leave RESERVED or RECEIVING; the Abort for a writer that is not fenced."""
        if self.state not in (InboundState.RESERVED, InboundState.RECEIVING):
            return ()
        self.failure = TransferFailed(reason, detail)
        self.state = InboundState.ABORTING
        self._failed_s = now_s
        if self._is_writer_fenced:
            return ()
        return (Abort(self.reservation.request_id, self.reservation.epoch, reason, detail),)

    def _settle(self) -> None:
        is_fenced = self._is_writer_fenced and self._in_hand is None
        if self.state is InboundState.ABORTING and is_fenced:
            self.state = InboundState.CLOSED

    def _refuse_seal(self, num_pieces: int, now_s: float) -> Refused:
        num_missing = int(self._claimed_LB.size - self._claimed_LB.sum())
        detail = (
            f"{self._num_arrived} of {num_pieces} pieces came; "
            f"{num_missing} of {self._claimed_LB.size} layers of blocks are missing"
        )
        self._fail(TransferFailure.MISSING_PIECES, detail, now_s)
        self._settle()
        return self._refused(TransferFailure.MISSING_PIECES, detail)

    def _refused(self, reason: TransferFailure, detail: str) -> Refused:
        return Refused(self.reservation.request_id, self.reservation.epoch, reason, detail)
