"""A step told to other ranks is the step that they compute."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.step_words import decode_steps, encode_steps

token_ids = st.integers(0, 2**31 - 1)
steps = st.builds(
    SequenceStep,
    token_ids=st.lists(token_ids, min_size=1, max_size=5),
    start=st.integers(0, 2**31 - 1),
    block_table=st.lists(token_ids, min_size=1, max_size=5),
    sampling=st.sampled_from([None, SamplingParams(temperature=1.0, seed=3)]),
)


@given(st.lists(steps, min_size=1, max_size=5))
def test_a_step_comes_back_as_it_was_but_for_how_tokens_are_drawn(steps):
    def greedy(step):
        return dataclasses.replace(step, sampling=step.sampling and SamplingParams())

    assert decode_steps(encode_steps(steps)) == [greedy(step) for step in steps]
