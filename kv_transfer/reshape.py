"""Which pages of one cache go where in a cache of another shape.

Two workers may differ in block size and in tensor-parallel size. Both then look at their caches
as caches of smaller blocks, *pages*: runs of tokens and heads that lie together on both sides, the
longest ones there are. The spans of a handoff stay in blocks of the target; a backend sees pages in
their place and needs to know nothing of shapes. Pure arithmetic on ids; no tensors.

Pages of a target block in plan order: token run by token run, in each rank by rank, in each head
run by head run. A head that several target ranks hold travels once for each of them. Slots of the
last target block that lie past the source's last block get a copy of the source's last tokens:
nobody reads them before decode writes them.

Ids count the pages of one row (K or V of one layer) of rank 0's cache. The caches of the other
ranks lie behind it in the same storage, so their pages have ids past the end of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any  # numpy shapes

import numpy as np

from core.errors import LayoutMismatch
from core.layout import KVLayout
from core.link import Span

Ids = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The caches of all ranks of one worker: `num_blocks` blocks of `layout`, rank by rank."""

    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PageShape:
    """Tokens and heads of a page."""

    num_tokens: int
    num_heads: int

    def num_per_block(self, layout: KVLayout) -> int:
        """Pages of one block in the cache of one rank."""
        return layout.block_size * layout.num_rank_kv_heads // (self.num_tokens * self.num_heads)


def page_shape(source: KVLayout, target: KVLayout) -> PageShape:
    """The largest page that is contiguous in both caches."""
    num_heads = gcd(source.num_rank_kv_heads, target.num_rank_kv_heads)
    is_whole = num_heads == source.num_rank_kv_heads == target.num_rank_kv_heads
    # A part of the heads is contiguous within one token only.
    num_tokens = gcd(source.block_size, target.block_size) if is_whole else 1
    return PageShape(num_tokens, num_heads)


def require_reshapable(source: KVLayout, target: KVLayout, *, may_convert_dtype: bool) -> None:
    """Refuse a pair of workers that can have no link.

    Raises:
        LayoutMismatch: names what differs, and both layouts.
    """
    obstacles = source.obstacles(target, may_convert_dtype=may_convert_dtype)
    if obstacles:
        raise LayoutMismatch(obstacles)


def source_blocks(span: Span, source: KVLayout, target: KVLayout) -> slice:
    """Places in the source's block table of the blocks that the span's tokens lie in."""
    start, stop = span.blocks.start * target.block_size, span.blocks.stop * target.block_size
    return slice(start // source.block_size, -(-stop // source.block_size))


class Reshape:
    """The pages that two caches have in common. Contract: side-effect free."""

    def __init__(self, source: CacheShape, target: CacheShape) -> None:
        self.page = page_shape(source.layout, target.layout)
        self._source = source
        self._target = target
        ranks = range(target.layout.tensor_parallel_size)
        step = self.page.num_heads
        held = [(rank, head) for rank in ranks for head in target.layout.kv_heads_of(rank)[::step]]
        holders = [(_first_holder(source.layout, head), head) for _, head in held]
        self._target_heads = self._head_ids(target, held)
        self._source_heads = self._head_ids(source, holders)

    @property
    def num_block_pages(self) -> int:
        """Pages of one block of the target, over all its ranks."""
        num_runs = self._target.layout.block_size // self.page.num_tokens
        return num_runs * len(self._target_heads)

    def span(self, span: Span) -> Span:
        """The span with pages in the place of blocks."""
        num = self.num_block_pages
        return Span(
            span.first_layer, span.num_layers, span.first_block * num, span.num_blocks * num
        )

    def target_pages(self, block_ids: Sequence[int]) -> list[int]:
        """Pages of these blocks of the target, in plan order."""
        slots = np.arange(0, self._target.layout.block_size, self.page.num_tokens)
        runs = self._run_ids(self._target, np.asarray(block_ids, np.intp)[:, None], slots[None])
        return _listed(runs.reshape(-1, 1) + self._target_heads)

    def source_pages(self, span: Span, block_ids: Sequence[int]) -> list[int]:
        """Pages of the source that fill the span, each at its place in plan order.

        block_ids are the source's blocks at `source_blocks(span)`; the last ones may be missing.
        """
        source, num_tokens = self._source.layout, self.page.num_tokens
        first, stop = (
            x * self._target.layout.block_size for x in (span.blocks.start, span.blocks.stop)
        )
        positions = (
            np.arange(first, stop, num_tokens) - first // source.block_size * source.block_size
        )
        positions = np.minimum(positions, len(block_ids) * source.block_size - num_tokens)
        places, slots = np.divmod(positions, source.block_size)
        runs = self._run_ids(self._source, np.asarray(block_ids, np.intp)[places], slots)
        return _listed(runs[:, None] + self._source_heads)

    def _run_ids(self, cache: CacheShape, block_ids: Ids, slots: Ids) -> Ids:
        """Rank 0's first page of each token run."""
        num_head_runs = cache.layout.num_rank_kv_heads // self.page.num_heads
        num_pages = self.page.num_per_block(cache.layout)
        return block_ids * num_pages + slots // self.page.num_tokens * num_head_runs

    def _head_ids(self, cache: CacheShape, heads: Sequence[tuple[int, int]]) -> Ids:
        """What to add to a token run's first page, for each (rank, first head of a head run)."""
        rank_pages = 2 * cache.layout.num_layers * row_pages(cache, self.page)
        return np.array(
            [
                rank * rank_pages
                + (head - cache.layout.kv_heads_of(rank).start) // self.page.num_heads
                for rank, head in heads
            ],
            dtype=np.intp,
        )


def row_pages(cache: CacheShape, page: PageShape) -> int:
    """Pages of K or V of one layer in the cache of one rank."""
    return cache.num_blocks * page.num_per_block(cache.layout)


def _listed(ids: Ids) -> list[int]:
    listed: list[int] = ids.reshape(-1).tolist()
    return listed


def _first_holder(layout: KVLayout, head: int) -> int:
    ranks = range(layout.tensor_parallel_size)
    return next(rank for rank in ranks if head in layout.kv_heads_of(rank))
