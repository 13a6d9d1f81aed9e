"""The official double of a card: CPU memory, and plain calls in the place of streams and graphs.

With it everything that the runner does on a card and not on a CPU runs in tests and dry runs:
packed uploads, the choice among flash-attn's kernels (`engine.attention.flash_double`), the cache
sized from free memory, decode steps padded to a rung and replayed. What a real graph would not see,
its replay does not see either: it reads only the memory that it was captured on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any  # flash-attn's packages have no types

import torch

from engine.attention import Attention, AttentionNeeds, select_attention
from engine.batch import Array
from engine.device.interface import Graph
from engine.device.packing import pack, places_of, views_of
from engine.device.written import Written

HOPPER = (9, 0)


class CardDouble:
    """A card with `num_free_bytes` and, by name, the packages that are installed for it.

    await_kernels() is what it takes to wait for the kernels that were enqueued so far.
    """

    def __init__(
        self,
        packages: Mapping[str, Any] | None = None,
        *,
        capability: tuple[int, int] = HOPPER,
        num_free_bytes: int = 8 << 20,
        await_kernels: Callable[[], object] = lambda: None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.graphs = PlainGraphs()
        self._await_kernels = await_kernels
        self._written = Written()
        self._packages = packages or {}
        self._capability = capability
        self._num_free_bytes = num_free_bytes

    def select_attention(self, needs: AttentionNeeds) -> Attention:
        """See `Device`."""
        return select_attention(
            needs, capability=self._capability, import_kernel=self._import_kernel
        )

    def _import_kernel(self, name: str) -> Any:
        if name not in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self._packages[name]

    def upload(
        self, arrays: Sequence[Array], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """See `Device`; packed as for a card."""
        size = places_of(arrays)[1]
        staging = torch.empty(size, dtype=torch.uint8)
        pack(arrays, staging)
        if target is None:
            return views_of(arrays, staging)
        target[:size].copy_(staging)
        return views_of(arrays, target)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Device`."""
        try:
            yield
        finally:
            self._written.drain()

    def when_written(self, tell: Callable[[], None]) -> None:
        """See `Device`; told by another thread, as by a card."""
        self._written.when(self._await_kernels, tell)

    def free_bytes(self) -> int | None:
        """See `Device`."""
        return self._num_free_bytes


class PlainGraphs:
    """A graph is a call that is made again and overwrites the same tensor; counts replays."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """See `GraphMaker`."""
        out = run()
        self.num_captured += 1

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay
