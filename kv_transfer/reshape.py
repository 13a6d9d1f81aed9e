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

from dataclasses import dataclass
from math import gcd

import numpy as np

from core.layout import KVLayout
from core.link import Span

Ids = np.ndarray[tuple[int], np.dtype[np.intp]]


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
        self._num_pages = self.page.num_per_block(target.layout)
        self._target_offsets = self._offsets(target, range(target.layout.tensor_parallel_size))
        # Where the source has the heads of the target's ranks, in their order.
        ranks = range(target.layout.tensor_parallel_size)
        self._wanted = [h for r in ranks for h in target.layout.kv_heads_of(r)][
            :: self.page.num_heads
        ]

    def span(self, span: Span) -> Span:
        """The span with pages in the place of blocks."""
        num = self._num_pages * self._target.layout.tensor_parallel_size
        return Span(
            span.first_layer, span.num_layers, span.first_block * num, span.num_blocks * num
        )
