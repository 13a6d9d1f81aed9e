"""The two ends of a link over NCCL: pieces are staged, sent, received and scattered.

Rank 0 is decode, rank 1 is prefill, as over gloo (`kv_transfer.torch_backend`). Only decode's own
`take` writes into its cache: NCCL writes into a staging buffer, which outlives the group. NCCL
needs equal sizes at both ends, so decode posts a receive when it knows the piece.

Memory of a link: at prefill num_slots buffers of slot_bytes (8 x 4 MiB unless a layer of a block is
more), at decode one, and what NCCL takes for its channels (docs/gpu.md).
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import Offer
from kv_transfer.cuda.device_pages import DevicePages
from kv_transfer.cuda.lane import Lane
from kv_transfer.cuda.nccl_pair import OpenGroup, Pair, build_pair, open_nccl
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec, forget_keys


class NcclReceiver:
    """Decode's end of a link: only its own `take` writes into the cache."""

    def __init__(
        self,
        store: TCPStore,
        spec: LinkSpec,
        cache_L2NSKD: torch.Tensor,
        take_timeout_s: float,
        *,
        open_group: OpenGroup = open_nccl,
    ) -> None:
        self._store = store
        self._spec = spec
        self._device = cache_L2NSKD.device
        self._lane = Lane(self._device)
        self._pages = DevicePages(cache_L2NSKD)
        self._take_timeout_s = take_timeout_s
        self._open_group = open_group
        self._pair: Pair | None = None
        self._slot = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._taking = threading.Lock()
        self._is_closed = False

    def accept(self, timeout_s: float) -> None:
        """Build rank 0 of the pair, which needs the sender to build rank 1."""
        with self._turn():
            with self._lane.working():
                self._slot = self._spec.allocate_slots(1, self._device)[0]
            try:
                self._pair = build_pair(
                    self._spec, DECODE, self._device, timeout_s, self._open_group
                )
            except PeerLost:
                forget_keys(self._store, self._spec.prefix)
                raise
            if self._is_closed:
                raise PeerLost(self._spec.prefix, "the link was closed meanwhile")

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Receive the next piece and put it into the target blocks, or throw it away."""
        num_bytes = span.num_layers * 2 * span.num_blocks * self._pages.page_bytes
        with self._turn():
            if self._is_closed or self._pair is None:
                raise PeerLost(self._spec.prefix, "the link is closed")
            try:
                with self._lane.working():
                    staging = self._slot[:num_bytes]
                    self._pair.receive(staging, self._take_timeout_s)
                    if target_block_ids is None:
                        return 0
                    return self._pages.scatter(span, target_block_ids, staging)
            except (RuntimeError, TimeoutError) as error:
                raise PeerLost(self._spec.prefix, f"the group failed: {error}") from error

    def is_writer_gone(self) -> bool:
        """True once closed and not inside `take`."""
        return self._is_closed and not self._taking.locked()

    def close(self) -> None:
        """Abort the group; a `take` that is waiting keeps it until it returns."""
        self._is_closed = True
        self._drop_if_closed()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            with self._taking:
                yield
        finally:
            self._drop_if_closed()

    def _drop_if_closed(self) -> None:
        """Whoever comes last, `close` or the call that it came upon, drops the group."""
        if self._is_closed and self._taking.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._taking.release()

    def _drop(self) -> None:
        if self._pair is not None:
            self._pair.abort(self._slot)
            self._pair = None
            forget_keys(self._store, self._spec.prefix)


class NcclSender:
    """Prefill's end of a link: stages pieces and never waits for a send."""

    def __init__(
        self,
        spec: LinkSpec,
        cache_L2NSKD: torch.Tensor,
        timeout_s: float,
        *,
        open_group: OpenGroup = open_nccl,
    ) -> None:
        self._spec = spec
        self._lane = Lane(cache_L2NSKD.device)
        self._pages = DevicePages(cache_L2NSKD)
        self._lock = threading.Lock()
        device = cache_L2NSKD.device
        with self._lane.working():
            self._slots = spec.allocate_slots(spec.num_slots, device)
        self._pair: Pair | None = build_pair(spec, PREFILL, device, timeout_s, open_group)
        self._free = deque(self._slots)
        self._in_flight: dict[PieceId, tuple[torch.Tensor, Any]] = {}

    @property
    def max_piece_bytes(self) -> int:
        """A staging buffer's size."""
        return self._spec.slot_bytes

    def has_room(self) -> bool:
        """True if a staging buffer is free."""
        with self._lock:
            return bool(self._free)

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Copy the piece to a staging buffer and start its send; its checksum."""
        num_bytes = span.num_layers * 2 * span.num_blocks * self._pages.page_bytes
        assert num_bytes <= self.max_piece_bytes, "it was planned for another link"
        with self._lock:
            pair = self._pair
            if pair is None:
                raise PeerLost(self._spec.prefix, f"the link was closed before {piece_id}")
            buffer = self._free.popleft()
        # Outside the lock: `acknowledge` and `close` must not wait for the card.
        try:
            with self._lane.working():
                checksum = self._pages.gather(span, source_block_ids, buffer[:num_bytes])
                work = pair.send(buffer[:num_bytes])
        except RuntimeError as error:
            raise PeerLost(self._spec.prefix, f"the group failed: {error}") from error
        with self._lock:
            if self._pair is not None:
                self._in_flight[piece_id] = (buffer, work)
        return checksum

    def acknowledge(self, piece_id: PieceId) -> None:
        """The piece was received, so its send is over though nobody waited for it."""
        with self._lock:
            buffer, _ = self._in_flight.pop(piece_id, (None, None))
            if buffer is not None:
                self._free.append(buffer)

    def close(self) -> None:
        """Abort the group and what is in flight."""
        with self._lock:
            if self._pair is not None:
                self._pair.abort(*self._slots)
                self._pair = None
            self._in_flight.clear()
            self._free.clear()


def connect(
    offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float, open_group: OpenGroup = open_nccl
) -> NcclSender:
    """The sender's end of the link that `offer` describes.

    Raises:
        PeerLost: decode did not build its end within `timeout_s`.
    """
    return NcclSender(LinkSpec.of_offer(offer), cache_L2NSKD, timeout_s, open_group=open_group)
