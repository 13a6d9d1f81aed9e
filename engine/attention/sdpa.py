"""torch's fused attention on KV gathered from the cache: any device, any block size.

Each layer copies the history of the batch before it reads it, so decode moves the KV three times.
Letters as in `engine.attention`; G = H / K query heads of one key/value head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from engine.batch import Batch

MASK_CACHE_SIZE = 4
BLOCK_SIZE = 16
FIRST_GRAPH_WIDTH = 32
# Gathered per layer: 1 GiB of a model with 8 key/value heads of 128 in bfloat16.
MAX_GRAPH_TOKENS = 256 << 10


class SdpaAttention:
    """Prompts one by one, decode rows together."""

    def __init__(self, reason: str, block_size: int | None = None) -> None:
        self.name = "sdpa"
        self.reason = reason
        self.block_size = block_size or BLOCK_SIZE

    def graph_widths(self, num_sequences: int, max_width: int) -> tuple[int, ...]:
        """See `Attention`: doubling, since a step costs what its table could hold."""
        largest = min(max_width, MAX_GRAPH_TOKENS // (num_sequences * self.block_size))
        widths = [FIRST_GRAPH_WIDTH]
        while widths[-1] < largest:
            widths.append(2 * widths[-1])
        return tuple(sorted({min(width, largest) for width in widths} - {0}))

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_2NSKD: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """See `Attention`."""
        if batch.is_decode:
            return _attend_rows(q_THD, kv_2NSKD, batch.block_tables_BP, batch.context_lens_B)
        out_THD = torch.empty_like(q_THD)
        attend_spans(q_THD, (k_TKD, v_TKD), kv_2NSKD, batch, out_THD)
        if batch.decode_rows.numel():
            rows, sequences = batch.decode_rows, batch.decode_sequences
            tables, lengths = batch.block_tables_BP[sequences], batch.context_lens_B[sequences]
            out_THD[rows] = _attend_rows(q_THD[rows], kv_2NSKD, tables, lengths)
        return out_THD


def _attend_rows(
    q_BHD: torch.Tensor, kv_2NSKD: torch.Tensor, tables_BP: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """One query row per sequence, all over as many tokens as a table could hold.

    Reads no value on the host, so that the step can be a CUDA graph. What lies past the end of a
    sequence is somebody else's, perhaps no number: the last token is taken in its place.
    """
    _, _, S, K, D = kv_2NSKD.shape
    num_sequences, width = tables_BP.shape
    positions_L = torch.arange(width * S, device=q_BHD.device)
    taken_BL = torch.minimum(positions_L, lengths_B[:, None] - 1)
    slots_BL = tables_BP.long().gather(1, taken_BL // S) * S + taken_BL % S
    kv = kv_2NSKD.flatten(1, 2).index_select(1, slots_BL.flatten())
    k_BKLD, v_BKLD = kv.view(2, num_sequences, width * S, K, D).transpose(2, 3)
    is_past_B11L = (positions_L < lengths_B[:, None])[:, None, None]
    # Folded: the heads of a group become query rows (3 x faster than enable_gqa on a CPU).
    q_BKGD = q_BHD.reshape(num_sequences, K, -1, D)
    return F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, is_past_B11L).flatten(1, 2)


def attend_spans(
    q_THD: torch.Tensor,
    fresh_TKD: tuple[torch.Tensor, torch.Tensor],
    kv_2NSKD: torch.Tensor,
    batch: Batch,
    out_THD: torch.Tensor,
) -> None:
    """Fill the rows of out that belong to sequences with several new tokens."""
    for span in batch.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        mask_TL = None
        if span.start == 0:
            k_1KLD, v_1KLD = (x[rows].transpose(0, 1).unsqueeze(0) for x in fresh_TKD)
        else:
            k_1KLD, v_1KLD = _gather(kv_2NSKD, span.block_table, span.end)
            mask_TL = _mask(span.start, span.num_rows, q_THD.dtype, q_THD.device)
            if q_THD.device.type != "cpu":  # no fused CUDA kernel takes a mask and grouped heads
                groups = q_THD.shape[1] // k_1KLD.shape[1]
                k_1KLD, v_1KLD = (x.repeat_interleave(groups, dim=1) for x in (k_1KLD, v_1KLD))
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
