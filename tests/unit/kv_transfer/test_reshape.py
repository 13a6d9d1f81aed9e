"""Blocks of one shape become blocks of another: every value where a naive loop puts it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.layout import Dtype, KVLayout
from core.link import Span
from kv_transfer.reshape import (
    CacheShape,
    PageShape,
    Reshape,
    page_shape,
    row_pages,
    source_blocks,
)

NUM_LAYERS, DIM = 2, 3


def layout_of(block_size, num_kv_heads, size):
    return KVLayout("w", Dtype.FLOAT32, block_size, NUM_LAYERS, num_kv_heads, DIM, size)


def empty_caches(cache):
    """The caches of all ranks: (R, L, 2, N, S, K of a rank, D)."""
    layout = cache.layout
    shape = (layout.tensor_parallel_size, NUM_LAYERS, 2, cache.num_blocks, layout.block_size)
    return np.zeros((*shape, layout.num_rank_kv_heads, DIM), dtype=np.float32)


def write_reference(caches, cache, block_ids, kv_L2TKD):
    """Put whole-model KV of tokens [0, T) where each rank has it, one number at a time."""
    for rank in range(cache.layout.tensor_parallel_size):
        for local, head in enumerate(cache.layout.kv_heads_of(rank)):
            for token in range(kv_L2TKD.shape[2]):
                block, slot = divmod(token, cache.layout.block_size)
                caches[rank, :, :, block_ids[block], slot, local] = kv_L2TKD[:, :, token, head]


def rows_of(caches, cache, page):
    """Every row as the backends see it: from its first page to the end of the storage."""
    elements = page.num_tokens * page.num_heads * DIM
    flat = caches.reshape(-1, elements)
    return [flat[row * row_pages(cache, page) :] for row in range(2 * NUM_LAYERS)]


@st.composite
def handoffs(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = [n for n in (1, 2, 3, 4, 8) if num_kv_heads % n == 0 or n % num_kv_heads == 0]
    layouts = [
        layout_of(
            draw(st.sampled_from([1, 2, 3, 4, 6, 8])), num_kv_heads, draw(st.sampled_from(sizes))
        )
        for _ in range(2)
    ]
    num_tokens = draw(st.integers(1, 20))
    caches, tables = [], []
    for layout in layouts:
        num_used = layout.num_blocks(num_tokens)
        cache = CacheShape(layout, num_used + draw(st.integers(0, 3)))
        caches.append(cache)
        tables.append(draw(st.permutations(range(cache.num_blocks)))[:num_used])
    first_block = draw(st.integers(0, len(tables[1]) - 1))
    num_blocks = draw(st.integers(1, len(tables[1]) - first_block))
    return caches, tables, num_tokens, (first_block, num_blocks)


@settings(max_examples=300)
@given(handoffs())
def test_pages_bring_each_value_to_where_the_reference_puts_it_and_touch_nothing_else(handoff):
    (source, target), (source_table, target_table), num_tokens, (first_block, num_blocks) = handoff
    rng = np.random.default_rng(1)
    kv_L2TKD = rng.random((NUM_LAYERS, 2, num_tokens, source.layout.num_kv_heads, DIM))
    source_caches, target_caches = empty_caches(source), empty_caches(target)
    write_reference(source_caches, source, source_table, kv_L2TKD.astype(np.float32))
    span = Span(0, NUM_LAYERS, first_block, num_blocks)

    reshape = Reshape(source, target)
    from_pages = reshape.source_pages(
        span, source_table[source_blocks(span, source.layout, target.layout)]
    )
    to_pages = reshape.target_pages(target_table[first_block : first_block + num_blocks])
    assert len(from_pages) == len(to_pages) == reshape.span(span).num_blocks
    for from_row, to_row in zip(
        rows_of(source_caches, source, reshape.page),
        rows_of(target_caches, target, reshape.page),
        strict=True,
    ):
        to_row[to_pages] = from_row[from_pages]

    expected = empty_caches(target)
    write_reference(expected, target, target_table, kv_L2TKD.astype(np.float32))
    shipped = set(target_table[first_block : first_block + num_blocks])
    for place, block_id in enumerate(target_table):
        if block_id not in shipped:
            expected[:, :, :, block_id] = 0
            continue
        # slots past the prompt hold anything
        num_slots = min(target.layout.block_size, num_tokens - place * target.layout.block_size)
        target_caches[:, :, :, block_id, num_slots:] = 0
    np.testing.assert_array_equal(target_caches, expected)


@given(handoffs())
def test_a_span_takes_as_many_bytes_in_pages_as_in_blocks(handoff):
    (source, target), _, _, (first_block, num_blocks) = handoff
    page = Reshape(source, target).page
    page_bytes = page.num_tokens * page.num_heads * DIM * 4
    span = Reshape(source, target).span(Span(0, 1, first_block, num_blocks))
    assert span.num_blocks * page_bytes == num_blocks * target.layout.page_bytes
    assert span.first_block * page_bytes == first_block * target.layout.page_bytes


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (layout_of(16, 4, 1), layout_of(16, 4, 1), PageShape(16, 4)),
        (layout_of(16, 4, 1), layout_of(32, 4, 1), PageShape(16, 4)),
        (layout_of(32, 4, 1), layout_of(16, 4, 1), PageShape(16, 4)),
        (layout_of(16, 4, 1), layout_of(24, 4, 1), PageShape(8, 4)),
        (layout_of(16, 4, 2), layout_of(16, 4, 2), PageShape(16, 2)),
        (layout_of(16, 4, 1), layout_of(16, 4, 2), PageShape(1, 2)),
        (layout_of(16, 2, 4), layout_of(16, 2, 1), PageShape(1, 1)),
    ],
)
def test_pages_are_as_large_as_both_shapes_allow(source, target, expected):
    assert page_shape(source, target) == expected
    assert page_shape(target, source) == expected


def test_equal_shapes_of_one_rank_need_no_translation():
    cache, other = CacheShape(layout_of(4, 2, 1), 9), CacheShape(layout_of(4, 2, 1), 5)
    reshape = Reshape(cache, other)
    assert reshape.num_block_pages == 1
    assert reshape.target_pages([3, 1]) == [3, 1]
    assert reshape.source_pages(Span(0, 1, 2, 2), [7, 8]) == [7, 8]
    assert reshape.span(Span(0, 1, 2, 2)) == Span(0, 1, 2, 2)
