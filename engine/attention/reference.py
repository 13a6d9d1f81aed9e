"""Attention in plain torch, never optimised: the twin that the others are compared with.

Letters as in `engine.attention`.
"""

import torch

from engine.batch import Batch


class ReferenceAttention:
    """Gather, explicit mask, softmax in float32, one sequence at a time."""

    def __init__(self, reason: str = "the plain twin", *, dtype: torch.dtype = torch.float32):
        """`dtype` is that of the arithmetic."""
        self.name = "reference"
        self.reason = reason
        self.block_size = 16
        self._dtype = dtype

    def graph_widths(self, num_sequences: int, max_width: int) -> tuple[int, ...]:
        """See `Attention`: it reads lengths, which a graph would freeze."""
        return ()

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_2NSKD: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """See `Attention`."""
        out_THD = torch.empty_like(q_THD)
        groups = q_THD.shape[1] // kv_2NSKD.shape[3]
        starts = batch.query_starts_B1.tolist()
        for b, length in enumerate(batch.context_lens_B.tolist()):
            rows = slice(starts[b], starts[b + 1])
            kv_2LKD = kv_2NSKD[:, batch.block_tables_BP[b]].flatten(1, 2)[:, :length]
            k_LHD, v_LHD = kv_2LKD.to(self._dtype).repeat_interleave(groups, dim=2)
            scores_HTL = torch.einsum("thd,lhd->htl", q_THD[rows].to(self._dtype), k_LHD)
            scores_HTL *= q_THD.shape[-1] ** -0.5
            positions_L = torch.arange(length, device=q_THD.device)
            is_later = positions_L > batch.positions_T[rows][:, None]
            weights_HTL = scores_HTL.masked_fill_(is_later, float("-inf")).softmax(dim=-1)
            out_THD[rows] = torch.einsum("htl,lhd->thd", weights_HTL, v_LHD).to(q_THD.dtype)
        return out_THD
