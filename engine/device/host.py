"""A CPU as the runner's device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.attention import Attention, AttentionNeeds, select_attention
from engine.batch import Array, upload_to_host


class HostDevice:
    """A CPU: everything happens at once, in the calling thread."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.graphs = None

    def select_attention(self, needs: AttentionNeeds) -> Attention:
        """See `Device`."""
        return select_attention(needs)

    def upload(
        self, arrays: Sequence[Array], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """See `Device`; the same memory."""
        assert target is None, "nothing is replayed on a CPU"
        return upload_to_host(arrays)

    def computing(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return nullcontext()

    def when_written(self, tell: Callable[[], None]) -> None:
        """See `Device`: it is done already."""
        tell()

    def free_bytes(self) -> int | None:
        """See `Device`: memory is lent by the system, which tells when it has none."""
        return None
