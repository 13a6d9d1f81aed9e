"""Spans cover what has to be shipped exactly once and respect the size limit where they can."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.layout import Dtype, KVLayout
from core.link import Span
from core.request import RequestId
from kv_transfer.plan import Reservation, plan_spans, span_bytes

SMOLLM2 = KVLayout("w", Dtype.FLOAT32, 16, 30, 3, 64)


@given(
    num_layers=st.integers(1, 9),
    first_layer=st.integers(0, 9),
    first_block=st.integers(0, 5),
    num_blocks=st.integers(0, 20),
    max_bytes=st.integers(1, 20_000),
    dtype=st.sampled_from(Dtype),
)
def test_spans_cover_every_byte_exactly_once_within_the_limit(
    num_layers, first_layer, first_block, num_blocks, max_bytes, dtype
):
    layout = KVLayout("w", dtype, 4, num_layers, 2, 8)
    spans = plan_spans(
        layout,
        layers=range(first_layer, num_layers),
        blocks=range(first_block, first_block + num_blocks),
        max_bytes=max_bytes,
    )
    covered_LB = np.zeros((num_layers, first_block + num_blocks), dtype=int)
    for span in spans:
        covered_LB[span.layers.start : span.layers.stop, span.blocks.start : span.blocks.stop] += 1
        smallest = span.num_layers == span.num_blocks == 1
        assert span_bytes(layout, span) <= max_bytes or smallest
    assert (covered_LB[first_layer:, first_block:] == 1).all()
    assert (covered_LB[:first_layer] == 0).all()
    assert (covered_LB[:, :first_block] == 0).all()
    total = sum(span_bytes(layout, span) for span in spans)
    num_planned_layers = max(0, num_layers - first_layer)
    assert total == num_blocks * num_planned_layers * 2 * layout.page_bytes


def test_layers_are_cut_before_blocks():
    spans = plan_spans(SMOLLM2, layers=range(30), blocks=range(2, 34), max_bytes=4 * 1024 * 1024)
    assert [span.num_layers for span in spans] == [5] * 6
    assert {(span.first_block, span.num_blocks) for span in spans} == {(2, 32)}


def test_blocks_are_cut_when_one_layer_is_too_large():
    limit = 4 * 2 * SMOLLM2.page_bytes
    spans = plan_spans(SMOLLM2, layers=range(30), blocks=range(6), max_bytes=limit)
    assert spans[:3] == (Span(0, 1, 0, 3), Span(0, 1, 3, 3), Span(1, 1, 0, 3))


def test_a_prompt_of_smollm2_ships_the_bytes_of_the_formula():
    reservation = Reservation(RequestId("a"), 1, tuple(range(40)), num_prompt_tokens=512)
    blocks = reservation.shipped_blocks(SMOLLM2)
    spans = plan_spans(SMOLLM2, layers=range(30), blocks=blocks, max_bytes=10**6)
    assert sum(span_bytes(SMOLLM2, span) for span in spans) == 512 * 46_080


def test_cached_blocks_are_not_shipped_and_a_partial_block_is():
    reservation = Reservation(
        RequestId("a"), 1, (7, 8, 9, 4), num_prompt_tokens=33, num_cached_blocks=1
    )
    assert reservation.shipped_blocks(SMOLLM2) == range(1, 3)
