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
# A chunk of a prompt whose log-probabilities are wanted: only the last has no target for its end.
scored_steps = steps.map(
    lambda step: dataclasses.replace(
        step, targets=step.token_ids[: None if step.sampling is None else -1], num_top=3
    )
)


@given(st.lists(steps | scored_steps, min_size=1, max_size=5))
def test_a_step_comes_back_as_it_was_but_for_how_tokens_are_drawn(steps):
    def told(step):
        return (step.token_ids, step.start, step.block_table, step.num_logits)

    assert [told(s) for s in decode_steps(encode_steps(steps))] == [told(s) for s in steps]
