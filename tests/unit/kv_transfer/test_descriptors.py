"""One-sided writes name exactly the pages of a piece, in as few runs as there are."""

from hypothesis import given
from hypothesis import strategies as st

from core.link import Span
from kv_transfer.nixl.descriptors import PageTable, runs_of

PAGE_BYTES = 256
SOURCE = PageTable(address=1 << 20, page_bytes=PAGE_BYTES, num_blocks=12, device_id=0)
TARGET = PageTable(address=1 << 30, page_bytes=PAGE_BYTES, num_blocks=20, device_id=1)


def pages_reference(table, span, block_ids):
    """Address of every page of the span in plan order: layer, K before V, block."""
    return [
        table.address + ((layer * 2 + kind) * table.num_blocks + block) * PAGE_BYTES
        for layer in span.layers
        for kind in range(2)
        for block in block_ids
    ]


def pages_of_rows(rows):
    return [
        int(address) + offset
        for address, num_bytes, _ in rows
        for offset in range(0, int(num_bytes), PAGE_BYTES)
    ]


@given(st.data())
def test_the_runs_of_both_ends_cover_the_same_pages_in_plan_order(data):
    num_blocks = data.draw(st.integers(1, 12))
    source_ids = data.draw(st.permutations(range(12)))[:num_blocks]
    target_ids = data.draw(st.permutations(range(20)))[:num_blocks]
    span = Span(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)), 0, num_blocks)
    runs = runs_of(source_ids, target_ids)
    source_rows = SOURCE.rows(span, runs.sources, runs.lengths)
    target_rows = TARGET.rows(span, runs.targets, runs.lengths)
    assert pages_of_rows(source_rows) == pages_reference(SOURCE, span, source_ids)
    assert pages_of_rows(target_rows) == pages_reference(TARGET, span, target_ids)
    assert source_rows[:, 1].tolist() == target_rows[:, 1].tolist()
    assert set(target_rows[:, 2].tolist()) == {1}


def test_blocks_that_follow_each_other_at_both_ends_are_one_write_a_row():
    runs = runs_of((3, 4, 5, 6), (10, 11, 12, 13))
    assert len(SOURCE.rows(Span(0, 2, 0, 4), runs.sources, runs.lengths)) == 4


def test_a_run_breaks_where_either_end_jumps():
    runs = runs_of((3, 4, 5, 6, 9), (10, 11, 15, 16, 17))
    assert runs.sources.tolist() == [3, 5, 9]
    assert runs.targets.tolist() == [10, 15, 17]
    assert runs.lengths.tolist() == [2, 2, 1]
