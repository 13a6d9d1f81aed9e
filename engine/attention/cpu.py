"""Attention on a CPU: torch's fused attention for prompts, a compiled paged kernel for decode.

Letters as in `engine.attention`.
"""

import numpy as np
import torch

from engine.attention.sdpa import BLOCK_SIZE, attend_spans
from engine.batch import Batch
from engine.ops import bits


class CpuAttention:
    """Sequences with one new token take `decode_kernel`, all others torch."""

    def __init__(self, head_dim: int, block_size: int | None = None) -> None:
        """Load the kernel; it compiles on its first call.

        Raises:
            ImportError: numba is not there.
            RuntimeError: numba finds no place for its compiled code.
            ValueError: the kernel does not take this head size.
        """
        from engine.attention.decode_kernel import decode_attention, tile_of

        self.name = "numba"
        self.reason = "CPU with numba: paged kernel for decode, fused torch attention for prefill"
        self.block_size = block_size or BLOCK_SIZE
        self._decode = decode_attention
        self._tile_of = tile_of
        self._tile_of(1, head_dim)  # refuses a head size that the kernel does not take
        self._scale = np.float32(head_dim**-0.5)

    def graph_widths(self, num_sequences: int, max_width: int) -> tuple[int, ...]:
        """See `Attention`: the kernel reads what the table names, whatever its width."""
        return (max_width,)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_2NSKD: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """See `Attention`."""
        out_THD = q_THD.new_empty(q_THD.shape)
        attend_spans(q_THD, (k_TKD, v_TKD), kv_2NSKD, batch, out_THD)
        if batch.decode_rows.numel():
            where = (
                batch.decode_rows.numpy(),
                batch.decode_sequences.numpy(),
                batch.block_tables_BP.numpy(),
                batch.context_lens_B.numpy(),
            )
            q, kv, out = bits(q_THD), bits(kv_2NSKD), bits(out_THD)
            tile = self._tile_of(q_THD.shape[1] // kv_2NSKD.shape[3], q_THD.shape[2])
            self._decode(tile, q, kv, where, self._scale, out)
        return out_THD
