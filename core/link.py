"""What the two ends of a KV link say to each other; bytes travel beside it, not in it.

The control side of a link is one ordered stream between a sender, which is a prefill worker or a
decode worker that stops, and a decode worker. Upwards: OpenLink, then Begin, Piece, Seal, Abort,
AbortAck. Downwards: LinkOpened or LinkRefused, then Granted, PieceAck, Sealed, TransferRefused,
Abort, AbortAck. `docs/handoff.md` tells the order.
"""

from dataclasses import dataclass

from core.errors import TransferFailure, TwophaseError
from core.layout import KVLayout
from core.request import RequestId, WorkerName


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [first_layer, +num_layers) of blocks [first_block, +num_blocks) of one request.

    Block numbers are places in the reservation's list of blocks, not cache block ids.
    """

    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    @property
    def layers(self) -> range:
        """Layers of the span."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def blocks(self) -> range:
        """Places of the span's blocks in the reservation's list."""
        return range(self.first_block, self.first_block + self.num_blocks)


@dataclass(frozen=True, slots=True)
class PieceId:
    """Names a piece on its link: epochs are never used twice by one decode worker."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Header of one piece, sent on the control stream after its bytes were handed to the backend.

    index counts the pieces of one handoff from 0; checksum is XXH3-64 of the bytes in plan order
    (layer, K before V, block).
    """

    request_id: RequestId
    epoch: int
    index: int
    span: Span
    num_bytes: int
    checksum: int

    @property
    def piece_id(self) -> PieceId:
        """Name of the piece on its link."""
        return PieceId(self.epoch, self.index)


@dataclass(frozen=True, slots=True)
class OpenLink:
    """A sender asks a decode worker for a link; where its cache lies, and what it reaches.

    prefill_worker is the sender's name.
    card and reachable_cards as `kv_transfer.backend.Endpoint` has them.
    """

    prefill_worker: WorkerName
    incarnation: str
    decode_incarnation: str
    layout: KVLayout
    backend: str
    host_id: str
    device: str
    has_nixl: bool
    has_rdma: bool
    card: str = ""
    reachable_cards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The decode worker's offer: which backend, why, and what the sender needs to connect.

    Handoffs are planned in blocks of `layout`, which is decode's; its cache has num_blocks.
    """

    kind: str
    reason: str
    parameters: tuple[tuple[str, str], ...]
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The sender asks leave to write into one reservation; before it is granted it writes nothing.

    This is what fences one-sided writes: from the grant until an abort is acknowledged, and only
    then, decode knows who may be writing into the blocks.
    """

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The sender may write into the blocks of that epoch."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Seal:
    """All pieces were sent and no more is written; decode goes on after first_token_id."""

    request_id: RequestId
    epoch: int
    num_pieces: int
    first_token_id: int


@dataclass(frozen=True, slots=True)
class PieceAck:
    """Decode took the piece off the link: its staging buffer is free.

    Says nothing about whether the piece counted: only Sealed proves a handoff.
    """

    request_id: RequestId
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every byte was proven; the blocks are decode's alone."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class TransferRefused:
    """The handoff ended at decode without proven blocks."""

    request_id: RequestId
    epoch: int
    reason: TransferFailure
    detail: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The handoff is over; the other side answers AbortAck.

    From prefill it also promises that prefill will not write any more.
    """

    request_id: RequestId
    epoch: int
    reason: TransferFailure
    detail: str


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Answer to Abort, also for an unknown epoch: the sender of this will not write any more."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """No link: the layouts differ, or the wrong incarnation was meant."""

    error: TwophaseError


LinkUp = OpenLink | Begin | Piece | Seal | Abort | AbortAck
LinkDown = (
    LinkOpened | LinkRefused | Granted | PieceAck | Sealed | TransferRefused | Abort | AbortAck
)
