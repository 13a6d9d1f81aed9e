"""Transfer on one host: prefill maps decode's cache, on the same card or on a peer, and writes.

1. `offer` exports the cache's memory and listens for the lifeline.
2. `connect` ties the lifeline first, then maps the memory and says that it is built.
3. `send` copies pages into decode's cache and returns when the card has done it.
4. `take` hashes them where they lie.

**What fences a writer.** Its kernels write whatever decode does, so only the writer's word counts:
the lifeline's goodbye, said when its stream is empty and the memory is given up, or the death of
its process, after which the driver is assumed to have nothing of it left on the card. That does not
hold under MPS, where another process works for it.

A sender on another card than decode's keeps a context on decode's card, which takes some hundred
MiB there. Not run where it was written, but for its double (`kv_transfer.cuda.double`).
"""

import logging
import threading
from collections.abc import Sequence

import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import BackendKind, Offer
from kv_transfer.cuda.device_pages import DevicePages
from kv_transfer.cuda.lane import Lane
from kv_transfer.cuda.mapping import CudaMemory, Memory
from kv_transfer.lifeline import Lifeline, LifelineServer
from kv_transfer.patience import is_done_within

MAX_PIECE_BYTES = 4 * 1024 * 1024
WRITE_TIMEOUT_S = 10.0
END_THREAD = "ipc-end"

LOG = logging.getLogger(__name__)


class IpcBackend:
    """Makes links into the decode worker's cache."""

    kind = BackendKind.IPC.value

    def __init__(self, *, host: str, memory: Memory | None = None) -> None:
        self._host = host
        self._memory = memory or CudaMemory()
        self._receivers: list[IpcReceiver] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory that can be handed over; a worker's cache is made by its engine."""
        return self._memory.allocate(num_bytes)

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, "IpcReceiver"]:
        """A new link into `cache_L2NSKD`."""
        lifeline = LifelineServer(self._host)
        parameters = {
            **self._memory.export(cache_L2NSKD),
            "cache_offset": str(cache_L2NSKD.storage_offset() * cache_L2NSKD.itemsize),
            "num_blocks": str(cache_L2NSKD.shape[2]),
            **lifeline.parameters,
        }
        receiver = IpcReceiver(link_id, lifeline, cache_L2NSKD)
        self._receivers = [r for r in self._receivers if not r.is_writer_gone()]
        self._receivers.append(receiver)
        return Offer(self.kind, parameters), receiver

    def close(self) -> None:
        """Forget every link's lifeline; the memory lives as long as its tensors."""
        for receiver in self._receivers:
            receiver.discard()
        self._receivers.clear()


class IpcReceiver:
    """Decode's end of a link: the lifeline of its writer."""

    def __init__(self, link_id: str, lifeline: LifelineServer, cache_L2NSKD: torch.Tensor) -> None:
        self._link_id = link_id
        self._lifeline = lifeline
        self._lane = Lane(cache_L2NSKD.device)
        self._pages: DevicePages | None = DevicePages(cache_L2NSKD)

    def accept(self, timeout_s: float) -> None:
        """Wait for the sender's lifeline and for its word that it has mapped the cache."""
        try:
            self._lifeline.accept(timeout_s)
        except OSError as error:
            raise PeerLost(self._link_id, f"no sender mapped the cache: {error}") from error

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Checksum of the piece where it already lies; 0 if it is to be thrown away."""
        pages = self._pages
        if pages is None:
            raise PeerLost(self._link_id, "the link is closed")
        if target_block_ids is None:
            return 0
        with self._lane.working():
            return pages.checksum(span, target_block_ids)

    def is_writer_gone(self) -> bool:
        """True once closed and the sender is gone; see the module's docstring."""
        return self._lifeline.is_writer_gone()

    def close(self) -> None:
        """Tell the writer; the lifeline stays until it is proven gone."""
        self._pages = None
        self._lifeline.close()

    def discard(self) -> None:
        """Close all, proof or not: this process is about to give up the cache itself."""
        self.close()
        self._lifeline.discard()


class IpcSender:
    """Prefill's end of a link: decode's cache, mapped into this process.

    Invariant: the lifeline says goodbye only when the lane is idle and the mapping is given up.
    """

    def __init__(
        self, offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float, memory: Memory
    ) -> None:
        parameters = offer.parameters
        self._peer = parameters["lifeline_host"]
        self._lock = threading.Lock()
        self._is_closed = False
        self._lane = Lane(cache_L2NSKD.device)
        self._source = DevicePages(cache_L2NSKD)
        self._target: DevicePages | None = None
        try:
            self._lifeline = Lifeline(parameters, timeout_s)
        except OSError as error:
            raise PeerLost(self._peer, f"it did not let the link in: {error}") from error
        try:
            target = _cache_behind(memory.map(parameters), parameters, cache_L2NSKD)
            self._lane = Lane(cache_L2NSKD.device, target.device)
            self._target = DevicePages(target)
            self._lifeline.say_built()
        except PeerLost:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise PeerLost(self._peer, f"it went away: {error}") from error

    @property
    def max_piece_bytes(self) -> int:
        """Small enough that decode checks a piece while the next is written."""
        return MAX_PIECE_BYTES

    def has_room(self) -> bool:
        """Always: there is no staging."""
        return True

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Write the piece into decode's cache; the checksum of its bytes.

        After a copy that found no end in WRITE_TIMEOUT_S the target may be written for as long as
        the sender has not said goodbye: decode's quarantine holds.
        """
        with self._lock:
            if self._is_closed or self._target is None or self._lifeline.has_ended():
                raise PeerLost(self._peer, f"the link was closed before {piece_id}")
            with self._lane.working():
                checksum = self._source.copy_to(
                    self._target, span, source_block_ids, target_block_ids
                )
            if not self._lane.is_idle_within(WRITE_TIMEOUT_S):
                raise PeerLost(self._peer, f"{piece_id} was not copied in {WRITE_TIMEOUT_S} s")
            return checksum

    def acknowledge(self, piece_id: PieceId) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Unmap decode's cache, then say goodbye: now, or as soon as the copy under way is over."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._try_end():
            threading.Thread(target=self._end, name=END_THREAD, daemon=True).start()

    def _try_end(self) -> bool:
        """End the link unless a copy is under way; True if there is nothing more to do."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._lane.is_idle():
                return False
            self._target = None
            self._lifeline.close()
        except RuntimeError as error:  # the card has failed: only this process's end is a proof
            LOG.warning("the link to %s ends without a goodbye: %s", self._peer, error)
        finally:
            self._lock.release()
        return True

    def _end(self) -> None:
        """Wait for the copy under way, however long it takes: until then decode's blocks rest."""
        is_done_within(self._try_end, float("inf"))


def connect(
    offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float, memory: Memory | None = None
) -> IpcSender:
    """The sender's end of the link that `offer` describes.

    Raises:
        PeerLost: decode did not let it in within `timeout_s`, or its memory cannot be mapped.
    """
    return IpcSender(offer, cache_L2NSKD, timeout_s, memory or CudaMemory())


def _cache_behind(
    storage: torch.Tensor, parameters: dict[str, str], cache_L2NSKD: torch.Tensor
) -> torch.Tensor:
    """Decode's cache in the mapped storage: as ours, but for the number of blocks."""
    shape = list(cache_L2NSKD.shape)
    shape[2] = int(parameters["num_blocks"])
    start = int(parameters["cache_offset"])
    num_bytes = torch.Size(shape).numel() * cache_L2NSKD.itemsize
    return storage[start : start + num_bytes].view(cache_L2NSKD.dtype).view(shape)
