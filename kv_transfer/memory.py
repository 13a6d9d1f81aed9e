"""Transfer inside one process: the official double for tests and the simulator.

Behaves like a two-sided backend: bytes are staged by `send`, lie on the link, and reach the cache
when `take` is called. Faults are constructor arguments, so that every way in which a network can
misbehave is one line in a test.
"""

import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import BackendKind, Offer
from kv_transfer.pages import HostPages

MAX_PIECE_BYTES = 4 * 1024 * 1024
TAKE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Link:
    """What both ends of a link share: pieces on their way, and who is still there."""

    link_id: str
    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[tuple[float, torch.Tensor]] = field(default_factory=deque)
    has_sender: bool = False
    is_closed: bool = False


class MemoryBackend:
    """Joins senders and receivers of one process; `connect` is the sender's side.

    drop and corrupt name pieces by their index in the handoff: a dropped piece never arrives, of
    a corrupt one a byte is flipped on the way. Every piece takes `delay_s` seconds to arrive.
    """

    kind = BackendKind.MEMORY.value

    def __init__(
        self,
        *,
        drop: Container[int] = (),
        corrupt: Container[int] = (),
        delay_s: float = 0.0,
        take_timeout_s: float = TAKE_TIMEOUT_S,
    ) -> None:
        self.drop = drop
        self.corrupt = corrupt
        self.delay_s = delay_s
        self.take_timeout_s = take_timeout_s
        self._links: dict[str, _Link] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, "MemoryReceiver"]:
        """A new link into `cache_L2NSKD`."""
        link = self._links[link_id] = _Link(link_id)
        return Offer(self.kind, {"link_id": link_id}), MemoryReceiver(self, link, cache_L2NSKD)

    def connect(self, offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> "MemorySender":
        """The sender's end of an offered link.

        Raises:
            PeerLost: the receiver has already closed the link.
        """
        link = self._links.get(offer.parameters["link_id"])
        if link is None or link.is_closed:
            raise PeerLost(offer.parameters["link_id"], "the link is closed")
        with link.changed:
            link.has_sender = True
            link.changed.notify_all()
        return MemorySender(self, link, cache_L2NSKD)

    def close(self) -> None:
        """End all links."""
        for link in list(self._links.values()):
            self.end(link)

    def end(self, link: _Link) -> None:
        """Forget `link` and wake whoever waits on it; idempotent."""
        self._links.pop(link.link_id, None)
        with link.changed:
            link.is_closed = True
            link.pieces.clear()
            link.changed.notify_all()


class MemoryReceiver:
    """Decode's end of a link."""

    def __init__(self, backend: MemoryBackend, link: _Link, cache_L2NSKD: torch.Tensor) -> None:
        self._backend = backend
        self._link = link
        self._pages = HostPages(cache_L2NSKD)

    def accept(self, timeout_s: float) -> None:
        """Wait for `connect`."""
        link = self._link
        with link.changed:
            link.changed.wait_for(lambda: link.has_sender or link.is_closed, timeout_s)
            if not link.has_sender or link.is_closed:
                raise PeerLost(link.link_id, f"no sender connected within {timeout_s} s")

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Wait for the next piece and put it into the target blocks, or throw it away."""
        staging = self._next_piece()
        if target_block_ids is None:
            return 0
        return self._pages.scatter(span, target_block_ids, staging)

    def is_writer_gone(self) -> bool:
        """True once closed: only `take` writes into the cache."""
        return self._link.is_closed

    def close(self) -> None:
        """End the link."""
        self._backend.end(self._link)

    def _next_piece(self) -> torch.Tensor:
        link = self._link
        with link.changed:
            link.changed.wait_for(
                lambda: link.pieces or link.is_closed, self._backend.take_timeout_s
            )
            if not link.pieces:
                why = "closed" if link.is_closed else "silent"
                raise PeerLost(link.link_id, f"the sender is {why}")
            due_s, staging = link.pieces.popleft()
        time.sleep(max(0.0, due_s - time.monotonic()))
        return staging


class MemorySender:
    """Prefill's end of a link."""

    def __init__(self, backend: MemoryBackend, link: _Link, cache_L2NSKD: torch.Tensor) -> None:
        self._backend = backend
        self._link = link
        self._pages = HostPages(cache_L2NSKD)

    @property
    def max_piece_bytes(self) -> int:
        """As large as those of the other backends."""
        return MAX_PIECE_BYTES

    def has_room(self) -> bool:
        """Always: each piece gets its own staging buffer."""
        return True

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Put the piece on the link, unless a fault is ordered; its checksum before the fault."""
        num_pages = span.num_layers * 2 * span.num_blocks
        staging = torch.empty(num_pages * self._pages.page_bytes, dtype=torch.uint8)
        checksum = self._pages.gather(span, source_block_ids, staging)
        if piece_id.index in self._backend.corrupt:
            staging[len(staging) // 2] ^= 1
        link = self._link
        with link.changed:
            if link.is_closed:
                raise PeerLost(link.link_id, f"the link was closed before {piece_id}")
            if piece_id.index not in self._backend.drop:
                link.pieces.append((time.monotonic() + self._backend.delay_s, staging))
                link.changed.notify_all()
        return checksum

    def acknowledge(self, piece_id: PieceId) -> None:
        """Nothing to free: the receiver owns the staging buffer."""

    def close(self) -> None:
        """End the link."""
        self._backend.end(self._link)
