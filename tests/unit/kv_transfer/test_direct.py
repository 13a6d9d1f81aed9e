"""Large pieces are cut into messages alike at both ends: all pages, once, in plan order."""

from hypothesis import given
from hypothesis import strategies as st

from core.link import Span
from kv_transfer.direct import MESSAGE_BYTES, MIN_RUN_BYTES, cut


@given(
    span=st.builds(
        Span, st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.integers(1, 700)
    ),
    page_bytes=st.sampled_from([16, 4096, 12_288, 700_000, 3 << 20]),
)
def test_messages_cover_every_page_once_in_plan_order_within_the_limit(span, page_bytes):
    parts = cut(span, page_bytes)
    pages = [(row, p) for part in parts for row in part.rows for p in range(part.start, part.stop)]
    rows = range(2 * span.layers.start, 2 * span.layers.stop)
    assert pages == [(row, page) for row in rows for page in range(span.num_blocks)]
    for part in parts:
        assert part.num_pages * page_bytes <= max(MESSAGE_BYTES, page_bytes)


def test_a_long_row_has_messages_of_its_own_and_short_ones_share():
    long = cut(Span(0, 2, 0, MIN_RUN_BYTES // 4096), 4096)
    assert [(part.rows, part.num_pages) for part in long] == [
        (range(row, row + 1), MIN_RUN_BYTES // 4096) for row in range(4)
    ]
    short = cut(Span(0, 30, 0, 8), 12_288)
    assert [len(part.rows) for part in short] == [10] * 6
