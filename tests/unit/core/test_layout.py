"""Sizes of KV blocks by the formula, and the fingerprint that two workers compare."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.layout import Dtype, KVLayout

SMOLLM2 = KVLayout("w", Dtype.FLOAT32, block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)

layouts = st.builds(
    KVLayout,
    weights_hash=st.sampled_from(["a", "b"]),
    dtype=st.sampled_from(Dtype),
    block_size=st.integers(1, 64),
    num_layers=st.integers(1, 8),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64]),
    tensor_parallel_size=st.integers(1, 2),
    protocol_version=st.integers(1, 2),
)

OTHER_VALUES = {
    "weights_hash": "x",
    "dtype": Dtype.BFLOAT16,
    "block_size": 32,
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 128,
    "tensor_parallel_size": 2,
    "protocol_version": 2,
}


def test_a_token_of_smollm2_takes_46080_bytes():
    assert SMOLLM2.token_bytes == 46_080
    assert SMOLLM2.page_bytes == 16 * 3 * 64 * 4
    assert SMOLLM2.block_bytes == 16 * 46_080


def test_half_the_bytes_in_bfloat16():
    half = dataclasses.replace(SMOLLM2, dtype=Dtype.BFLOAT16)
    assert half.token_bytes * 2 == SMOLLM2.token_bytes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_the_last_block_may_be_partly_full(num_tokens, num_blocks):
    assert SMOLLM2.num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVLayout)])
def test_each_field_shows_in_differences_with_both_values_and_in_the_fingerprint(name):
    other = dataclasses.replace(SMOLLM2, **{name: OTHER_VALUES[name]})
    expected = f"{name} {getattr(SMOLLM2, name)} != {OTHER_VALUES[name]}"
    assert SMOLLM2.differences(other) == expected
    assert SMOLLM2.fingerprint != other.fingerprint


def test_equal_layouts_have_no_differences():
    assert SMOLLM2.differences(dataclasses.replace(SMOLLM2)) == ""


def test_several_differences_are_all_told():
    other = dataclasses.replace(SMOLLM2, num_layers=1, head_dim=16)
    assert SMOLLM2.differences(other) == "num_layers 30 != 1, head_dim 64 != 16"


def test_each_rank_holds_a_share_of_the_heads_or_a_copy_of_one():
    two = dataclasses.replace(SMOLLM2, num_kv_heads=4, tensor_parallel_size=2)
    assert [list(two.kv_heads_of(rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert two.page_bytes == 2 * two.rank_page_bytes == 16 * 4 * 64 * 4
    eight = dataclasses.replace(two, tensor_parallel_size=8)
    assert [list(eight.kv_heads_of(rank)) for rank in (0, 1, 2, 7)] == [[0], [0], [1], [3]]
    assert eight.page_bytes == 2 * two.page_bytes
    assert eight.block_bytes == 8 * eight.rank_block_bytes


@pytest.mark.case("B-025", "B-027")
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVLayout)])
@pytest.mark.parametrize("may_convert_dtype", [True, False])
def test_only_shapes_may_differ_and_what_may_not_is_told_with_both_layouts(name, may_convert_dtype):
    other = dataclasses.replace(SMOLLM2, **{name: OTHER_VALUES[name]})
    obstacles = SMOLLM2.obstacles(other, may_convert_dtype=may_convert_dtype)
    if name in ("block_size", "tensor_parallel_size") or (name == "dtype" and may_convert_dtype):
        assert obstacles == ""
    else:
        assert obstacles == f"{SMOLLM2.differences(other)} ({SMOLLM2} != {other})"


@given(layouts, layouts)
def test_fingerprints_and_differences_agree_with_equality(left, right):
    assert (left.fingerprint == right.fingerprint) is (left == right)
    assert (left.differences(right) == "") is (left == right)


@given(layouts, st.integers(0, 10_000))
def test_blocks_hold_all_tokens_and_no_block_is_empty(layout, num_tokens):
    num_slots = layout.num_blocks(num_tokens) * layout.block_size
    assert num_tokens <= num_slots < num_tokens + layout.block_size
