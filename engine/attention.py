"""The one door to attention: every token of a batch attends to its sequence's paged KV cache.

`select_attention` chooses among three implementations once and says why:

- `ReferenceAttention`: plain torch in float32 with an explicit mask. Never optimised; the twin
  that the others are compared with.
- `SdpaAttention`: torch's fused attention on gathered KV. Any device.
- `CpuAttention`: the same for prefill, and a compiled paged kernel for the rows of sequences with
  one new token (decode).

The batch's own keys and values must already lie in the cache; they also come as tensors, so that
a sequence that starts at 0 needs no gather. Letters: T tokens, H query heads, K key/value heads,
D head size, N blocks, S slots per block, L context length.
"""

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.ops import bits

MASK_CACHE_SIZE = 4


class Attention(Protocol):
    """Paged attention with a name, and the reason why it was chosen."""

    name: str
    reason: str

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


class ReferenceAttention:
    """Gather, explicit mask, softmax in float32, one sequence at a time."""

    def __init__(self, reason: str = "the plain twin") -> None:
        self.name = "reference"
        self.reason = reason

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
            kv_2LKD = kv_2NSKD[:, batch.block_tables_BP[b]].flatten(1, 2)[:, :length].float()
            k_LHD, v_LHD = kv_2LKD.repeat_interleave(groups, dim=2)
            scores_HTL = torch.einsum("thd,lhd->htl", q_THD[rows].float(), k_LHD)
            scores_HTL *= q_THD.shape[-1] ** -0.5
            is_later = torch.arange(length) > batch.positions_T[rows].cpu()[:, None]
            scores_HTL.masked_fill_(is_later.to(q_THD.device), float("-inf"))
            weights_HTL = scores_HTL.softmax(dim=-1)
            out_THD[rows] = torch.einsum("htl,lhd->thd", weights_HTL, v_LHD).to(q_THD.dtype)
        return out_THD


class SdpaAttention:
    """torch's fused attention for every sequence, on KV gathered from the cache."""

    def __init__(self, reason: str) -> None:
        self.name = "sdpa"
        self.reason = reason

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
        _attend_spans(q_THD, (k_TKD, v_TKD), kv_2NSKD, batch, out_THD)
        lengths = batch.context_lens_B.tolist()
        rows, sequences = batch.decode_rows.tolist(), batch.decode_sequences.tolist()
        for row, b in zip(rows, sequences, strict=True):
            k_1KLD, v_1KLD = _gather(kv_2NSKD, batch.block_tables_BP[b], lengths[b])
            # Folded: the heads of a group become query rows (3 x faster than enable_gqa here).
            q_1KGD = q_THD[row].view(1, kv_2NSKD.shape[3], -1, q_THD.shape[2])
            out_1KGD = F.scaled_dot_product_attention(q_1KGD, k_1KLD, v_1KLD)
            out_THD[row] = out_1KGD.flatten(0, 2)
        return out_THD


class CpuAttention:
    """torch's fused attention for prefill, the compiled paged kernel for decode."""

    def __init__(self, head_dim: int) -> None:
        """Load the kernel; it compiles on its first call.

        Raises:
            ImportError: numba is not there.
            RuntimeError: numba finds no place for its compiled code.
            ValueError: the kernel does not take this head size.
        """
        from engine.decode_kernel import decode_attention, tile_of

        self.name = "numba"
        self.reason = "CPU with numba: paged kernel for decode, fused torch attention for prefill"
        self._decode = decode_attention
        self._tile_of = tile_of
        self._tile_of(1, head_dim)  # refuses a head size that the kernel does not take
        self._scale = np.float32(head_dim**-0.5)

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
        _attend_spans(q_THD, (k_TKD, v_TKD), kv_2NSKD, batch, out_THD)
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


def select_attention(device: torch.device, head_dim: int) -> Attention:
    """The fastest implementation that works here; `.reason` says why this one."""
    if device.type != "cpu":
        return SdpaAttention(f"{device.type}: fused torch attention on gathered KV")
    try:
        return CpuAttention(head_dim)
    except (ImportError, RuntimeError, ValueError) as error:
        return SdpaAttention(f"the paged kernel cannot be used ({error}): fused torch attention")


def _attend_spans(
    q_THD: torch.Tensor,
    fresh_TKD: tuple[torch.Tensor, torch.Tensor],
    kv_2NSKD: torch.Tensor,
    batch: Batch,
    out_THD: torch.Tensor,
) -> None:
    for span in batch.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        mask_TL = None
        if span.start == 0:
            k_1KLD, v_1KLD = (x[rows].transpose(0, 1).unsqueeze(0) for x in fresh_TKD)
        else:
            k_1KLD, v_1KLD = _gather(kv_2NSKD, span.block_table, span.end)
            mask_TL = _mask(span.start, span.num_rows, q_THD.dtype, q_THD.device)
        q_1HTD = q_THD[rows].transpose(0, 1).unsqueeze(0)
        out_1HTD = F.scaled_dot_product_attention(
            q_1HTD, k_1KLD, v_1KLD, mask_TL, is_causal=mask_TL is None, enable_gqa=True
        )
        out_THD[rows] = out_1HTD[0].transpose(0, 1)


def _gather(
    kv_2NSKD: torch.Tensor, block_table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first `length` tokens of a sequence, each of shape (1, K, L, D)."""
    num_blocks = -(-length // kv_2NSKD.shape[2])
    blocks = kv_2NSKD.index_select(1, block_table[:num_blocks])
    k_KLD, v_KLD = blocks.flatten(1, 2)[:, :length].transpose(1, 2)
    return k_KLD.unsqueeze(0), v_KLD.unsqueeze(0)


@lru_cache(maxsize=MASK_CACHE_SIZE)
def _mask(start: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What to add to the scores of rows at positions from `start` on; all layers share it."""
    positions = torch.arange(start + num_rows, device=device)
    is_later = positions > positions[start:, None]
    return torch.zeros(is_later.shape, dtype=dtype, device=device).masked_fill_(
        is_later, float("-inf")
    )
