"""One handoff as the prefill worker sees it: what to push next, and when it is over.

Pure: facts and `now_s` in, messages and decisions out. Each method returns the messages to put
on the link's control stream, in order. Not thread-safe: the prefill worker calls it
in its event loop.

1. `begin` asks decode for the right to write; prefill computes meanwhile.
2. `layers_computed` and `computed` report progress; what is complete becomes pieces, layer group
   by layer group while a chunk is still in its later layers.
3. `next_piece` hands one out, the backend sends it, `sent` returns its header.
4. When all pieces are out, `sent` (or `granted`, if there is nothing to ship) adds the Seal.
5. Sealed ends it well. All else ends in FAILED, after the send in progress has returned.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from core.errors import TransferFailed, TransferFailure
from core.events.event import Event, EventKind
from core.layout import KVLayout
from core.link import Abort, AbortAck, Begin, LinkUp, Piece, PieceId, Seal, Span
from core.timeline import TransferReport
from kv_transfer.plan import PieceSizes, Reservation, plan_spans, span_bytes
from kv_transfer.reshape import source_blocks


class OutboundState(Enum):
    """Where a handoff stands at the prefill worker.

    ::

        BEGINNING --Granted--> PUSHING --last piece sent, Seal--> SEALING --Sealed--> SEALED
            |                     |                                  |
            +--refused, abort, deadline, link lost-------------------+
            |                     |                                  |
            |            (a send in progress)                        |
            |                     v                                  |
            |                 ABORTING --send returned--+            |
            |                                           v            |
            +---------------------------------------> FAILED <-------+

    SEALED and FAILED are final; the source blocks are released in them, once, and stay
    untouched before. ABORTING keeps the promise in Abort and AbortAck: neither is sent while the
    backend may still be writing.
    """

    BEGINNING = "beginning"
    PUSHING = "pushing"
    SEALING = "sealing"
    SEALED = "sealed"
    ABORTING = "aborting"
    FAILED = "failed"


_ACTIVE = (OutboundState.BEGINNING, OutboundState.PUSHING, OutboundState.SEALING)


@dataclass(frozen=True, slots=True)
class PieceToSend:
    """What the backend's `send` is called with; `reshape` turns the blocks into pages."""

    piece_id: PieceId
    span: Span
    source_block_ids: tuple[int, ...]
    target_block_ids: tuple[int, ...]


class OutboundTransfer:
    """The prefill worker's record of one handoff.

    `layout` is decode's, in whose blocks the handoff is planned; `source_layout` is prefill's, the
    same unless it is given.

    Invariants: at most one send is in progress; nothing is handed out before Granted or after
    the first Abort in either direction; the source blocks are released at most once, in a final
    state.
    """

    def __init__(
        self,
        reservation: Reservation,
        *,
        layout: KVLayout,
        backend: str,
        sizes: PieceSizes,
        deadline_s: float,
        source_layout: KVLayout | None = None,
    ) -> None:
        self.reservation = reservation
        self.state = OutboundState.BEGINNING
        self.failure: TransferFailed | None = None
        self.deadline_s = deadline_s
        self._layout = layout
        self._source_layout = source_layout or layout
        self._backend = backend
        self._sizes = sizes
        self._shipped = reservation.shipped_blocks(layout)
        # Of the blocks from _next_block on, layers below _next_layer are planned already.
        self._next_block = self._shipped.start
        self._next_layer = 0
        self._spans: deque[Span] = deque()
        self._source_block_ids: tuple[int, ...] = ()
        self._num_handed_out = 0
        self._in_progress: PieceToSend | None = None
        self._unacknowledged: dict[int, int] = {}
        self._num_acknowledged_bytes = 0
        self._owed: tuple[LinkUp, ...] = ()
        self._first_send_s: float | None = None
        self._computed_s: float | None = None
        self._first_token_id = 0
        self._sealed_s: float | None = None
        self._are_blocks_released = False

    @property
    def num_unacknowledged(self) -> int:
        """Pieces sent that decode has not taken off the link yet."""
        return len(self._unacknowledged)

    @property
    def num_in_flight_bytes(self) -> int:
        """Bytes that are computed and that decode has not taken off the link yet."""
        in_progress = [self._in_progress.span] if self._in_progress is not None else []
        waiting = [span_bytes(self._layout, span) for span in (*self._spans, *in_progress)]
        return sum(waiting) + sum(self._unacknowledged.values())

    def begin(self) -> tuple[LinkUp, ...]:
        """The request for the right to write; called once, first."""
        return (Begin(self.reservation.request_id, self.reservation.epoch),)

    def granted(self) -> tuple[LinkUp, ...]:
        """Decode lets us write; a Granted that crosses an abort changes nothing."""
        if self.state is not OutboundState.BEGINNING:
            return ()
        self.state = OutboundState.PUSHING
        return self._seal_if_all_sent()

    def computed(
        self,
        num_tokens: int,
        source_block_ids: tuple[int, ...],
        now_s: float,
        first_token_id: int | None,
    ) -> tuple[LinkUp, ...]:
        """The KV cache of the prompt's first `num_tokens` tokens lies in `source_block_ids`.

        Only whole blocks are shipped before the prompt's end, each layer of each block once, so
        that the bytes do not depend on the chunk size.
        """
        if self.state not in _ACTIVE:
            return ()
        self._plan(num_tokens, self._layout.num_layers, source_block_ids)
        if num_tokens == self.reservation.num_prompt_tokens:
            self._computed_s = now_s
            assert first_token_id is not None, "the prompt's end comes with the first token"
            self._first_token_id = first_token_id
        return self._seal_if_all_sent()

    def layers_computed(
        self, num_tokens: int, num_layers: int, source_block_ids: tuple[int, ...]
    ) -> None:
        """The step that makes `num_tokens` tokens complete has done its first `num_layers` layers.

        Waits until at least `sizes.min_bytes` are ready, so that small prompts go as one piece.
        """
        if self.state not in _ACTIVE:
            return
        num_blocks = self._stop_block(num_tokens) - self._next_block
        ready = (num_layers - self._next_layer) * num_blocks * 2 * self._layout.page_bytes
        if num_blocks > 0 and ready >= self._sizes.min_bytes:
            self._plan(num_tokens, num_layers, source_block_ids)

    def next_piece(self, now_s: float) -> PieceToSend | None:
        """The piece to send now; None while there is none, or one is already in progress."""
        if self.state is not OutboundState.PUSHING or self._in_progress or not self._spans:
            return None
        span = self._spans.popleft()
        blocks = slice(span.blocks.start, span.blocks.stop)
        self._in_progress = PieceToSend(
            piece_id=PieceId(self.reservation.epoch, self._num_handed_out),
            span=span,
            source_block_ids=self._source_block_ids[
                source_blocks(span, self._source_layout, self._layout)
            ],
            target_block_ids=self.reservation.block_ids[blocks],
        )
        self._num_handed_out += 1
        if self._first_send_s is None:
            self._first_send_s = now_s
        return self._in_progress

    def sent(self, checksum: int) -> tuple[LinkUp, ...]:
        """The backend returned: the piece's header, and what had to wait for it.

        The header is sent after an abort too: decode has to take the bytes off the link.
        """
        piece = self._in_progress
        assert piece is not None
        self._in_progress = None
        num_bytes = span_bytes(self._layout, piece.span)
        self._unacknowledged[piece.piece_id.index] = num_bytes
        header = Piece(
            request_id=self.reservation.request_id,
            epoch=piece.piece_id.epoch,
            index=piece.piece_id.index,
            span=piece.span,
            num_bytes=num_bytes,
            checksum=checksum,
        )
        return (header, *self._settle(), *self._seal_if_all_sent())

    def send_failed(self, detail: str) -> None:
        """The backend raised: the link is lost, nothing more can be said on it."""
        self._in_progress = None
        self.link_lost(detail)

    def acknowledged(self, index: int) -> None:
        """Decode took piece `index` off the link; a second acknowledgement changes nothing."""
        self._num_acknowledged_bytes += self._unacknowledged.pop(index, 0)

    def sealed(self, now_s: float) -> None:
        """Decode proved every byte; without effect after an abort."""
        if self.state is OutboundState.SEALING:
            self.state = OutboundState.SEALED
            self._sealed_s = now_s

    def refused(self, reason: TransferFailure, detail: str) -> None:
        """Decode refused the Begin or the Seal."""
        self._fail(reason, detail, owed=())

    def abort(self, reason: TransferFailure, detail: str) -> tuple[LinkUp, ...]:
        """End the handoff from this side; idempotent, and without effect once sealed."""
        request_id, epoch = self.reservation.request_id, self.reservation.epoch
        return self._fail(reason, detail, owed=(Abort(request_id, epoch, reason, detail),))

    def peer_aborted(self, reason: TransferFailure, detail: str) -> tuple[LinkUp, ...]:
        """Decode ended the handoff: its acknowledgement, now or when the send has returned."""
        ack = AbortAck(self.reservation.request_id, self.reservation.epoch)
        if self.state in _ACTIVE:
            return self._fail(reason, detail, owed=(ack,))
        self._owed += (ack,)
        return self._settle()

    def link_lost(self, detail: str) -> None:
        """The link is dead; idempotent, and without effect once sealed."""
        self._fail(TransferFailure.LINK_LOST, detail, owed=())
        self._owed = ()
        self._settle()

    def tick(self, now_s: float) -> tuple[LinkUp, ...]:
        """Let time pass: the deadline ends a handoff that is not sealed."""
        if self.state not in _ACTIVE or now_s < self.deadline_s:
            return ()
        return self.abort(TransferFailure.LEASE_EXPIRED, "the prefill worker's time is over")

    def try_release_blocks(self) -> bool:
        """True on the first call in a final state: the source blocks may be given back."""
        is_final = self.state in (OutboundState.SEALED, OutboundState.FAILED)
        if not is_final or self._are_blocks_released:
            return False
        self._are_blocks_released = True
        return True

    def report(self) -> TransferReport:
        """What was measured of a sealed handoff."""
        assert self._sealed_s is not None and self._computed_s is not None
        first_send_s = self._sealed_s if self._first_send_s is None else self._first_send_s
        return TransferReport(
            backend=self._backend,
            num_bytes=self._num_acknowledged_bytes,
            num_pieces=self._num_handed_out,
            push_s=self._sealed_s - first_send_s,
            exposed_s=self._sealed_s - self._computed_s,
            events=(Event(EventKind.TRANSFER, self._computed_s, self._sealed_s),),
        )

    def _stop_block(self, num_tokens: int) -> int:
        """First block that is not complete with `num_tokens` tokens."""
        if num_tokens == self.reservation.num_prompt_tokens:
            return self._shipped.stop
        return num_tokens // self._layout.block_size

    def _plan(self, num_tokens: int, num_layers: int, source_block_ids: tuple[int, ...]) -> None:
        """Turn layers [_next_layer, num_layers) of the blocks that become complete into spans."""
        stop = self._stop_block(num_tokens)
        self._source_block_ids = source_block_ids
        if stop > self._next_block:
            self._spans.extend(
                plan_spans(
                    self._layout,
                    layers=range(self._next_layer, num_layers),
                    blocks=range(self._next_block, stop),
                    max_bytes=self._sizes.max_bytes,
                )
            )
            self._next_layer = num_layers
        if num_layers == self._layout.num_layers:
            self._next_layer = 0
            self._next_block = max(self._next_block, stop)

    def _seal_if_all_sent(self) -> tuple[LinkUp, ...]:
        is_all_sent = self._computed_s is not None and not self._spans and self._in_progress is None
        if self.state is not OutboundState.PUSHING or not is_all_sent:
            return ()
        self.state = OutboundState.SEALING
        request_id, epoch = self.reservation.request_id, self.reservation.epoch
        return (Seal(request_id, epoch, self._num_handed_out, self._first_token_id),)

    def _fail(
        self, reason: TransferFailure, detail: str, *, owed: tuple[LinkUp, ...]
    ) -> tuple[LinkUp, ...]:
        if self.state not in _ACTIVE:
            return ()
        self.failure = TransferFailed(reason, detail)
        self.state = OutboundState.ABORTING
        self._spans.clear()
        self._owed = owed
        return self._settle()

    def _settle(self) -> tuple[LinkUp, ...]:
        """What is owed to decode, once no send is in progress."""
        if self._in_progress is not None:
            return ()
        if self.state is OutboundState.ABORTING:
            self.state = OutboundState.FAILED
        owed, self._owed = self._owed, ()
        return owed
