"""Transfer over torch.distributed: gloo between CPU caches, NCCL between cards (`cuda.nccl`).

Each link is a process group object of two ranks, built directly on a store: never the default
group and never `new_group`, which need a world that is known in advance. Rank 0 is decode, rank
1 is prefill. One TCPStore per decode process serves all links, each under a prefix of its own
that is never used twice, because gloo reads stale keys otherwise.

Traps that shaped this file (torch 2.13, measured 2026-11-30 on two cores):

- A gloo `send().wait()` hangs until the group's timeout when the receiver is killed. So a send
  is never waited for: the acknowledgement on the control stream frees its buffer.
- `is_completed()` of gloo's point-to-point work is never true; only `wait` in a thread tells.
- A timed-out wait poisons the group. So any failure closes the link.
- Receiving a piece only when its header is there costs 3 ms a piece when the cores are busy;
  receives posted ahead cost 0.1 ms. gloo takes a shorter message into a longer buffer, so
  buffers of one size are posted ahead.

Over gloo, pieces that do not fit a staging buffer go without (`direct`): what a handoff sends while
its prompt is still computed is small, and the receives posted ahead make it quick; what is ready
all at once, such as a prompt that prefill has cached, is large.
"""

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore, Work

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import STAGED_PIECE_BYTES, BackendKind, Offer, Receiver, Sender
from kv_transfer.cuda import nccl
from kv_transfer.cuda.nccl import NcclReceiver
from kv_transfer.cuda.nccl_pair import OpenGroup, open_nccl
from kv_transfer.direct import MAX_PIECE_BYTES, Messages, Sent
from kv_transfer.pages import HostPages
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec, build_pair, forget_keys

SLOT_BYTES = STAGED_PIECE_BYTES
NUM_SLOTS = 8
TAKE_TIMEOUT_S = 10.0
STORE_TIMEOUT_S = 10.0

_TAG = 0
HOST_MEMORY = torch.device("cpu")


class TorchBackend:
    """The decode worker's store, on which every link builds its own group.

    slot_bytes bounds a piece that is staged, num_slots the pieces that a sender may have
    unacknowledged.
    """

    kind = BackendKind.TORCH.value

    def __init__(
        self,
        *,
        host: str,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        take_timeout_s: float = TAKE_TIMEOUT_S,
        open_group: OpenGroup | None = None,
    ) -> None:
        """open_group makes NCCL's groups; its double works with caches in CPU memory, too."""
        self._host = host
        self._open_group = open_group
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._take_timeout_s = take_timeout_s
        self._receivers: list[TorchReceiver | NcclReceiver] = []
        # Left to itself the store listens on every interface, and it asks nobody who he is.
        listening = socket.create_server((host, 0))
        self._store: TCPStore | None = TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listening.detach(),
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed ordinary memory; a CUDA cache is made by its owner."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, Receiver]:
        """A new link into `cache_L2NSKD`, whose device decides between gloo and NCCL."""
        assert self._store is not None
        num_layers, _, num_blocks = cache_L2NSKD.shape[:3]
        spec = LinkSpec(
            host=self._host,
            port=self._store.port,
            prefix=link_id,
            device="cpu" if self._is_host(cache_L2NSKD) else "cuda",
            num_slots=self._num_slots,
            slot_bytes=max(self._slot_bytes, cache_L2NSKD.nbytes // num_layers // num_blocks),
        )
        receiver = self._receiver(spec, cache_L2NSKD)
        self._receivers = [r for r in self._receivers if not r.is_writer_gone()]
        self._receivers.append(receiver)
        return spec.to_offer(), receiver

    def _is_host(self, cache_L2NSKD: torch.Tensor) -> bool:
        return cache_L2NSKD.device.type == "cpu" and self._open_group is None

    def _receiver(
        self, spec: LinkSpec, cache_L2NSKD: torch.Tensor
    ) -> "TorchReceiver | NcclReceiver":
        assert self._store is not None
        if self._is_host(cache_L2NSKD):
            return TorchReceiver(self._store, spec, cache_L2NSKD, self._take_timeout_s)
        return NcclReceiver(
            self._store,
            spec,
            cache_L2NSKD,
            self._take_timeout_s,
            open_group=self._open_group or open_nccl,
        )

    def close(self) -> None:
        """Close every link, then the store."""
        for receiver in self._receivers:
            receiver.close()
        self._receivers.clear()
        self._store = None


class TorchReceiver:
    """Decode's end of a link: only its own `take` writes into the cache."""

    def __init__(
        self,
        store: TCPStore,
        spec: LinkSpec,
        cache_L2NSKD: torch.Tensor,
        take_timeout_s: float,
    ) -> None:
        self._store = store
        self._spec = spec
        self._pages = HostPages(cache_L2NSKD)
        self._timeout = timedelta(seconds=take_timeout_s)
        self._messages = Messages(self._pages, take_timeout_s)
        self._group: Any = None  # a ProcessGroupGloo, untyped in torch
        self._posted: deque[tuple[torch.Tensor, Work]] = deque()
        self._taking = threading.Lock()
        self._is_closed = False

    def accept(self, timeout_s: float) -> None:
        """Build rank 0 of the pair, which needs the sender to build rank 1."""
        with self._turn():
            self._group = build_pair(self._spec, DECODE, timeout_s)
            for buffer in self._spec.allocate_slots(self._spec.num_slots, HOST_MEMORY):
                self._post(buffer)
            if self._is_closed:
                raise PeerLost(self._spec.prefix, "the link was closed meanwhile")

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Wait for the next piece and put it into the target blocks, or throw it away."""
        num_bytes = span.num_layers * 2 * span.num_blocks * self._pages.page_bytes
        with self._turn():
            if self._is_closed:
                raise PeerLost(self._spec.prefix, "the link is closed")
            try:
                return self._take(num_bytes, span, target_block_ids)
            except RuntimeError as error:
                raise PeerLost(self._spec.prefix, "the group failed") from error

    def is_writer_gone(self) -> bool:
        """True once closed and not inside `take`."""
        return self._is_closed and not self._taking.locked()

    def close(self) -> None:
        """Drop the group; a `take` that is waiting keeps it until it returns."""
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

    def _take(self, num_bytes: int, span: Span, target_block_ids: Sequence[int] | None) -> int:
        if num_bytes > self._spec.slot_bytes:
            return self._take_direct(span, target_block_ids)
        buffer, work = self._posted.popleft()
        work.wait(self._timeout)
        checksum = 0
        if target_block_ids is not None:
            checksum = self._pages.scatter(span, target_block_ids, buffer[:num_bytes])
        self._post(buffer)
        return checksum

    def _take_direct(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        if target_block_ids is not None:
            return self._messages.take(self._group, span, target_block_ids)
        self._messages.throw_away(self._group, span)
        return 0

    def _post(self, buffer: torch.Tensor) -> None:
        self._posted.append((buffer, self._group.recv([buffer], PREFILL, _TAG)))

    def _drop(self) -> None:
        if self._group is not None:
            self._group = None
            forget_keys(self._store, self._spec.prefix)
        self._posted.clear()


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A piece that is being sent; without a buffer it is read where it lies."""

    sent: Sent
    num_bytes: int
    buffer: torch.Tensor | None


class TorchSender:
    """Prefill's end of a link: stages pieces and never waits for a send."""

    def __init__(self, spec: LinkSpec, cache_L2NSKD: torch.Tensor, timeout_s: float) -> None:
        self._spec = spec
        self._pages = HostPages(cache_L2NSKD)
        self._lock = threading.Lock()
        self._messages = Messages(self._pages, TAKE_TIMEOUT_S)
        self._group: Any = build_pair(spec, PREFILL, timeout_s)
        self._free = deque(spec.allocate_slots(spec.num_slots, HOST_MEMORY))
        self._in_flight: dict[PieceId, _InFlight] = {}

    @property
    def max_piece_bytes(self) -> int:
        """More than a staging buffer's size: large pieces go without."""
        return max(self._spec.slot_bytes, MAX_PIECE_BYTES)

    def has_room(self) -> bool:
        """True if fewer pieces, and fewer bytes, are unacknowledged than staging buffers hold."""
        with self._lock:
            num_bytes = sum(piece.num_bytes for piece in self._in_flight.values())
            is_one_free = len(self._in_flight) < self._spec.num_slots
        return is_one_free and num_bytes < self._spec.num_slots * self._spec.slot_bytes

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Post the piece's sends, of a copy unless it is too large for that; its checksum."""
        num_bytes = span.num_layers * 2 * span.num_blocks * self._pages.page_bytes
        assert num_bytes <= self.max_piece_bytes, "it was planned for another link"
        with self._lock:
            group = self._group
            if group is None:
                raise PeerLost(self._spec.prefix, f"the link was closed before {piece_id}")
            buffer = self._free.popleft() if num_bytes <= self._spec.slot_bytes else None
        # Outside the lock: this takes a millisecond, for which `acknowledge` must not wait.
        try:
            if buffer is not None:
                staging = buffer[:num_bytes]
                checksum = self._pages.gather(span, source_block_ids, staging)
                sent = Sent(checksum, (group.send([staging], DECODE, _TAG),))
            else:
                sent = self._messages.send(group, span, source_block_ids)
        except RuntimeError as error:
            raise PeerLost(self._spec.prefix, "the group failed") from error
        with self._lock:
            if self._group is not None:
                self._in_flight[piece_id] = _InFlight(sent, num_bytes, buffer)
        return sent.checksum

    def acknowledge(self, piece_id: PieceId) -> None:
        """The piece was received, so its send is over though nobody waited for it."""
        with self._lock:
            piece = self._in_flight.pop(piece_id, None)
            if piece is None:
                return
            if piece.buffer is not None:
                self._free.append(piece.buffer)
            self._messages.release(piece.sent)

    def close(self) -> None:
        """Drop the group and what is in flight."""
        with self._lock:
            self._group = None
            self._in_flight.clear()
            self._free.clear()


def connect(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> Sender:
    """The sender's end of the link that `offer` describes.

    Raises:
        PeerLost: decode did not build its end within `timeout_s`.
    """
    if offer.parameters["device"] == "cuda":
        return nccl.connect(offer, cache_L2NSKD, timeout_s)
    return TorchSender(LinkSpec.of_offer(offer), cache_L2NSKD, timeout_s)
