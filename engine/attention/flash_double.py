"""flash-attn's entry points in plain torch: same signatures, shapes and refusals, on any device.

The official double: with it the calls of `flash2` and `flash3` run and are checked where there is
no card. It refuses what the packages refuse (page size, int32 tables and lengths, contiguity, head
ratio, number format; RuntimeError as theirs) and also what they would not notice but read or
compute wrongly: a table too short for its sequence, a block id outside the cache, a maximum that
is less than the longest sequence. Options that the engine does not use are refused, too.
Arithmetic is float32, rounded once. Letters as in `engine.attention`.
"""

from dataclasses import dataclass
from typing import Any  # options that are refused whatever they are

import torch

from engine.attention.flash2 import PAGE_MULTIPLE
from engine.attention.probe import FORMATS, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM

# Queries of a tile of the Hopper kernel. Larger prompts read pages by another way, which builds
# without paged KV have, too, where a page is a multiple of this.
HOPPER_TILE = 128


def require(condition: bool, message: str) -> None:
    """Raise what a failed check of the packages raises."""
    if not condition:
        raise RuntimeError(message)


class FlashAttn2Double:
    """What the engine uses of the package `flash_attn`, version 2.8."""

    __version__ = "2.8 (double)"

    def flash_attn_varlen_func(  # noqa: PLR0913 - the package's own signature
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Takes q as (total, heads, D), k and v as the cache: (N, S, K, D)."""
        _refuse_options(dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
        _refuse_options(deterministic, return_attn_probs)
        require(block_table is not None, "the double reads pages only")
        assert block_table is not None
        require(q.dim() == 3, "q must have shape (total_q, num_heads, head_size)")
        for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            _require_int32(name, starts, shape=(block_table.shape[0] + 1,))
        lengths_B = cu_seqlens_k.diff()
        require(int(lengths_B.max()) <= max_seqlen_k, "max_seqlen_k is less than a sequence")
        pages = _Pages(k, v, block_table, page_multiple=PAGE_MULTIPLE)
        return _varlen(q, pages, cu_seqlens_q, lengths_B, max_seqlen_q, causal=causal)

    def flash_attn_with_kvcache(  # noqa: PLR0913 - the package's own signature
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        """Takes q as (B, queries, heads, D): the last tokens of each sequence."""
        _refuse_options(k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
        _refuse_options(softmax_scale, window_size, softcap, alibi_slopes, return_softmax_lse)
        require(block_table is not None, "the double reads pages only")
        assert block_table is not None
        pages = _Pages(k_cache, v_cache, block_table, page_multiple=PAGE_MULTIPLE)
        return _padded(q, pages, cache_seqlens, causal=causal)


@dataclass(frozen=True, slots=True)
class FlashAttn3Double:
    """What the engine uses of the forward pass for Hopper cards.

    has_paged_kv False is a build without it (fa3-fwd 0.0.3): short queries are refused.
    """

    has_paged_kv: bool = True

    def flash_attn_with_kvcache(  # noqa: PLR0913 - the package's own signature
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: Any = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        pack_gqa: Any = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        """Takes q as (B, queries, heads, D), or (total, heads, D) where cu_seqlens_q is given."""
        _refuse_options(k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
        _refuse_options(cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale)
        _refuse_options(softmax_scale, window_size, attention_chunk, softcap, scheduler_metadata)
        _refuse_options(pack_gqa, sm_margin, return_softmax_lse)
        require(page_table is not None, "the double reads pages only")
        assert page_table is not None
        pages = _Pages(k_cache, v_cache, page_table, page_multiple=1)
        if cu_seqlens_q is None:
            self._require_paged_kv(q, pages, q.shape[1])
            return _padded(q, pages, cache_seqlens, causal=causal)
        require(max_seqlen_q is not None, "max_seqlen_q must be provided with cu_seqlens_q")
        assert max_seqlen_q is not None
        self._require_paged_kv(q, pages, max_seqlen_q)
        _require_int32("cu_seqlens_q", cu_seqlens_q, shape=(page_table.shape[0] + 1,))
        lengths_B = _lengths(cache_seqlens, page_table.shape[0])
        return _varlen(q, pages, cu_seqlens_q, lengths_B, max_seqlen_q, causal=causal)

    def _require_paged_kv(self, q: torch.Tensor, pages: "_Pages", num_queries: int) -> None:
        _, size, num_kv_heads, _ = pages.k_NSKD.shape
        is_large = num_queries * q.shape[-2] // num_kv_heads > HOPPER_TILE
        require(
            self.has_paged_kv or (is_large and size % HOPPER_TILE == 0),
            "This flash attention build does not support paged KV.",
        )


@dataclass(frozen=True, slots=True)
class _Pages:
    """One layer's cache and the blocks of each sequence, checked."""

    k_NSKD: torch.Tensor
    v_NSKD: torch.Tensor
    table_BP: torch.Tensor
    page_multiple: int

    def __post_init__(self) -> None:
        require(self.k_NSKD.dim() == 4, "k must have shape (num_blocks, page, num_heads_k, D)")
        require(self.v_NSKD.shape == self.k_NSKD.shape, "v must have the shape of k")
        require(self.v_NSKD.dtype == self.k_NSKD.dtype, "v must have the dtype of k")
        is_contiguous = self.k_NSKD.stride(-1) == self.v_NSKD.stride(-1) == 1
        require(is_contiguous, "Input tensor must have contiguous last dimension")
        require(
            self.k_NSKD.shape[1] % self.page_multiple == 0,
            f"Paged KV cache block size must be divisible by {self.page_multiple}",
        )
        require(self.table_BP.dtype == torch.int32, "block_table must have dtype torch.int32")
        require(
            self.table_BP.dim() == 2, "block_table must have shape (batch_size, max_num_blocks)"
        )
        require(self.table_BP.stride(-1) == 1, "block_table must have contiguous last dimension")

    def attend(self, q_THD: torch.Tensor, b: int, length: int, *, causal: bool) -> torch.Tensor:
        """Attention of the last T tokens of sequence b, which has `length`."""
        num_blocks, size, num_kv_heads, _ = self.k_NSKD.shape
        table = self.table_BP[b, : -(-length // size)].long()
        require(len(table) * size >= length, "a sequence exceeds what block_table can address")
        is_inside = bool(((table >= 0) & (table < num_blocks)).all())
        require(is_inside, "block_table names a block outside the cache")
        k_LKD, v_LKD = (x[table].flatten(0, 1)[:length].float() for x in (self.k_NSKD, self.v_NSKD))
        groups = q_THD.shape[1] // num_kv_heads
        k_LHD, v_LHD = (x.repeat_interleave(groups, dim=1) for x in (k_LKD, v_LKD))
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD.float(), k_LHD) * q_THD.shape[2] ** -0.5
        if causal:  # aligned to the bottom right
            positions_L = torch.arange(length, device=q_THD.device)
            is_later = positions_L > positions_L[length - q_THD.shape[0] :, None]
            scores_HTL.masked_fill_(is_later, float("-inf"))
        return torch.einsum("htl,lhd->thd", scores_HTL.softmax(dim=-1), v_LHD).to(q_THD.dtype)

    def require_query(self, q: torch.Tensor) -> None:
        """Refuse queries that do not go with these keys."""
        require(q.dtype in FORMATS, "FlashAttention only support fp16 and bf16 data type")
        require(self.k_NSKD.dtype == q.dtype, "query and key must have the same dtype")
        require(q.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        require(q.shape[-1] == self.k_NSKD.shape[-1], "query and key must have the same head size")
        require(q.shape[-1] <= MAX_HEAD_DIM, "head dimension at most 256")
        require(q.shape[-1] % HEAD_DIM_MULTIPLE == 0, "head_size should be a multiple of 8")
        require(
            q.shape[-2] % self.k_NSKD.shape[2] == 0,
            "Number of heads in key/value must divide number of heads in query",
        )


def _padded(
    q: torch.Tensor, pages: _Pages, cache_seqlens: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    require(q.dim() == 4, "q must have shape (batch_size, seqlen_q, num_heads, head_size)")
    require(q.shape[0] == pages.table_BP.shape[0], "block_table must have a row per sequence")
    pages.require_query(q)
    lengths = _lengths(cache_seqlens, q.shape[0]).tolist()
    rows = [pages.attend(q[b], b, length, causal=causal) for b, length in enumerate(lengths)]
    return torch.stack(rows)


def _varlen(  # noqa: PLR0913 - what the packages' varlen calls have in common
    q: torch.Tensor,
    pages: _Pages,
    cu_seqlens_q: torch.Tensor,
    lengths_B: torch.Tensor,
    max_seqlen_q: int,
    *,
    causal: bool,
) -> torch.Tensor:
    pages.require_query(q)
    starts = cu_seqlens_q.tolist()
    require(starts[0] == 0 and starts[-1] == q.shape[0], "cu_seqlens_q must cover all of q")
    require(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "max_seqlen_q is less than a sequence")
    out = torch.empty_like(q)
    for b, length in enumerate(lengths_B.tolist()):
        rows = slice(starts[b], starts[b + 1])
        out[rows] = pages.attend(q[rows], b, length, causal=causal)
    return out


def _lengths(cache_seqlens: torch.Tensor | None, num_sequences: int) -> torch.Tensor:
    require(cache_seqlens is not None, "cache_seqlens must be given with pages")
    assert cache_seqlens is not None
    _require_int32("cache_seqlens", cache_seqlens, shape=(num_sequences,))
    return cache_seqlens


def _require_int32(name: str, tensor: torch.Tensor, *, shape: tuple[int, ...]) -> None:
    require(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    require(tensor.is_contiguous(), f"{name} must be contiguous")
    require(tuple(tensor.shape) == shape, f"{name} must have shape {shape}")


def _refuse_options(*values: Any) -> None:
    """Refuse options that are set: the double has none of what they would do."""
    for value in values:
        if isinstance(value, torch.Tensor) or value not in (None, 0, (-1, -1)):
            raise NotImplementedError("an option of flash-attn that the double does not have")
