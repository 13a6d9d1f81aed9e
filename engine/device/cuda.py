"""A CUDA card as the runner's device. Not run where it was written: `docs/gpu.md` says what was.

Streams: a step computes on one stream of its own, and has ended when that stream has. After each
layer an event is recorded on it; who pushes the layer is told when the card has passed that event
(`written`), and then needs no stream's order to read it, while the next layers are computed. What a
link does is on a stream of the link's own (`kv_transfer.cuda.lane`). The model and its cache are
made on the compute stream, too.

Host to card: all arrays of a step are packed into one pinned buffer and go in one copy; the buffer
is written again only after that copy's event. Graphs share one memory pool.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from core.errors import ConfigError
from engine.attention import Attention, AttentionNeeds, select_attention
from engine.batch import Array
from engine.device.interface import Graph
from engine.device.packing import pack, places_of, views_of
from engine.device.written import Written

FIRST_BUFFER_BYTES = 1 << 16
# Libraries allocate their workspaces in the first calls, which a capture would keep.
NUM_WARM_UPS = 2


class CudaDevice:
    """One card, seen from the thread that steps; the streams live as long as this object."""

    def __init__(self, device: torch.device) -> None:
        """Open the card.

        Raises:
            ConfigError: torch sees no such card.
        """
        _require_card(device)
        self.torch_device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._written = Written()
        self.graphs = CudaGraphs(device, self._compute)
        self._pinned = _pinned(FIRST_BUFFER_BYTES)
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def select_attention(self, needs: AttentionNeeds) -> Attention:
        """See `Device`; a kernel makes its first calls on the stream that computes."""
        capability = torch.cuda.get_device_capability(self.torch_device)
        with self._computing():
            return select_attention(needs, capability=capability)

    def upload(
        self, arrays: Sequence[Array], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """See `Device`; one copy from pinned memory."""
        size = places_of(arrays)[1]
        self._uploaded.synchronize()
        if size > self._pinned.numel():
            self._pinned = _pinned(2 * size)
        pack(arrays, self._pinned)
        if target is None:
            target = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        target[:size].copy_(self._pinned[:size], non_blocking=True)
        self._uploaded.record()
        return views_of(arrays, target)

    def computing(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        # It waits for no other stream: what a link has put into the cache is there before anybody
        # is told of it, and its stream may wait for another host.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            try:
                yield
            finally:  # what failed half way may still write into blocks
                self._compute.synchronize()
                self._written.drain()

    def when_written(self, tell: Callable[[], None]) -> None:
        """See `Device`; a thread waits for an event, without keeping a core busy."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._compute)
        self._written.when(event.synchronize, tell)

    def free_bytes(self) -> int | None:
        """See `Device`; what torch holds and does not use is given back first."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]


class CudaGraphs:
    """Captures on the compute stream, into one pool, so that graphs share their scratch memory."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream) -> None:
        self._device = device
        self._compute = compute
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """See `GraphMaker`."""
        for _ in range(NUM_WARM_UPS):
            run()
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: links of other threads may allocate meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"
        ):
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def _require_card(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device",
            f"is cuda, and torch {torch.__version__} sees no card: no driver, none made visible, "
            "or a torch without CUDA",
            "cpu",
        )
    num_cards = torch.cuda.device_count()
    if (device.index or 0) >= num_cards:
        raise ConfigError("gpus", f"names card {device.index}; this process sees {num_cards}")


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
