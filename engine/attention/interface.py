"""What the model calls, what a choice of it depends on, and how a kernel says no.

Letters as in `engine.attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol  # flash-attn's packages have no types

import torch

from engine.batch import Batch

ImportKernel = Callable[[str], Any]


class Attention(Protocol):
    """Paged attention with a name, the reason why it was chosen, and the block size for it."""

    name: str
    reason: str
    block_size: int

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_2NSKD: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """out_THD in the format of q. kv is one layer's cache; k and v are the batch's own."""
        ...

    def graph_widths(self, num_sequences: int, max_width: int) -> tuple[int, ...]:
        """Block-table widths, rising, at which a decode step of so many may become a graph.

        A step runs in the narrowest that holds it. Empty where that is not worth it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What one rank asks of its attention; block_size None leaves it to the kernel."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None = None


class Unusable(Exception):  # noqa: N818 - it ends a try, not a program
    """A kernel cannot serve these needs here; says why, in words."""
