"""Least loaded workers that fit together, and words for why."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Mode
from core.layout import Dtype
from router.placement import DecodeLoad, Placement, PrefillLoad, Rejected, place
from tests.unit.router.doubles import LAYOUT

OTHER = dataclasses.replace(LAYOUT, num_layers=9)
layouts = st.sampled_from([LAYOUT, OTHER])


def prefill(name, num_prompt_tokens=0, layout=LAYOUT):
    return PrefillLoad(name, "1", layout, num_prompt_tokens)


def decode(name, num_sequences=0, layout=LAYOUT):
    return DecodeLoad(name, "1", layout, num_sequences, 4)


def test_the_least_loaded_of_each_pool_serve_and_the_words_say_so():
    placement = place(
        Mode.DISAGGREGATED,
        [prefill("prefill-0", 300), prefill("prefill-1", 20)],
        [decode("decode-0", 2), decode("decode-1", 1)],
    )
    assert (placement.prefill, placement.decode) == ("prefill-1", "decode-1")
    assert placement.why == (
        "prefill-1 has 20 prompt tokens to read; decode-1 has 1 of 4 sequences"
    )


def test_names_break_ties_whatever_the_order():
    workers = [decode("decode-1"), decode("decode-0")]
    assert place(Mode.CHUNKED, [], workers).decode == "decode-0"
    assert place(Mode.CHUNKED, [], workers[::-1]).decode == "decode-0"


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.CHUNKED])
def test_the_other_modes_read_prompts_where_they_decode(mode):
    placement = place(mode, [prefill("prefill-0")], [decode("decode-0")])
    assert placement.prefill is None
    assert placement.why == f"decode-0 has 0 of 4 sequences; mode {mode} reads prompts there"


@pytest.mark.parametrize(
    ("prefills", "decodes", "why"),
    [
        ([], [], "no decode worker can be used"),
        ([prefill("p")], [], "no decode worker can be used"),
        ([], [decode("d")], "no prefill worker can be used"),
        (
            [prefill("p", layout=OTHER)],
            [decode("d")],
            f"no prefill worker fits d: num_layers 9 != 2 ({OTHER} != {LAYOUT})",
        ),
    ],
)
def test_a_pool_that_cannot_serve_is_named(prefills, decodes, why):
    assert place(Mode.DISAGGREGATED, prefills, decodes) == Rejected(why)


@pytest.mark.parametrize(
    "change", [{"block_size": 8}, {"tensor_parallel_size": 2}, {"dtype": Dtype.BFLOAT16}]
)
def test_shapes_may_differ_and_formats_if_they_may_be_converted(change):
    workers = [prefill("p", layout=dataclasses.replace(LAYOUT, **change))], [decode("d")]
    is_format = "dtype" in change
    placement = place(Mode.DISAGGREGATED, *workers, may_convert_dtype=is_format)
    assert (placement.prefill, placement.decode) == ("p", "d")
    if is_format:
        assert isinstance(place(Mode.DISAGGREGATED, *workers), Rejected)


def test_a_less_loaded_decode_worker_that_no_prefill_worker_fits_is_passed_over():
    placement = place(
        Mode.DISAGGREGATED,
        [prefill("prefill-0")],
        [decode("decode-0", 0, OTHER), decode("decode-1", 3)],
    )
    assert (placement.prefill, placement.decode) == ("prefill-0", "decode-1")


@given(
    st.lists(st.builds(prefill, st.text(), st.integers(0, 9), layouts), max_size=4),
    st.lists(st.builds(decode, st.text(), st.integers(0, 9), layouts), max_size=4),
)
def test_any_pair_that_fits_is_enough_and_none_that_does_not_is_made(prefills, decodes):
    placement = place(Mode.DISAGGREGATED, prefills, decodes)
    pairs = [(p, d) for p in prefills for d in decodes if p.layout == d.layout]
    if not pairs:
        assert isinstance(placement, Rejected)
        return
    assert isinstance(placement, Placement)
    chosen = {
        (p.num_prompt_tokens, d.num_sequences)
        for p, d in pairs
        if (p.name, d.name) == (placement.prefill, placement.decode)
    }
    assert min(d.num_sequences for _, d in pairs) in {num for _, num in chosen}
