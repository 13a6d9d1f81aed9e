"""What the runner asks of a device, and what a device makes graphs with."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine.attention import Attention, AttentionNeeds
from engine.batch import Array

Graph = Callable[[], torch.Tensor]


class GraphMaker(Protocol):
    """Turns a computation on fixed memory into one that is launched as a whole."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """What computes `run` again, on the values that its inputs then have.

        The graph returns the same tensor each time, overwritten.

        Raises:
            RuntimeError: the computation asks the device for a value, or does not fit.
        """
        ...


class Device(Protocol):
    """One CPU or one card; graphs is None where there are none."""

    @property
    def torch_device(self) -> torch.device:
        """As torch knows it."""
        ...

    @property
    def graphs(self) -> GraphMaker | None:
        """What captures decode steps."""
        ...

    def select_attention(self, needs: AttentionNeeds) -> Attention:
        """The fastest attention that works here (`engine.attention`)."""
        ...

    def upload(
        self, arrays: Sequence[Array], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The arrays as tensors of the device; they lie in `target` (flat uint8) if it is given.

        The arrays may be changed as soon as this returns.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Compute inside: what was started on the device is done when the context ends."""
        ...

    def when_written(self, tell: Callable[[], None]) -> None:
        """Have `tell` called once all that was started so far is done; called in `computing`.

        It is called before `computing` ends, in order, in this thread or in another.
        """
        ...

    def free_bytes(self) -> int | None:
        """Memory that is free; None where it does not bound a KV cache."""
        ...
