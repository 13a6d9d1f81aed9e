"""Bias, least length and penalties against a plain loop over token ids; log-probabilities."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.sampling.logits import History, changed_logits, logprobs_of

VOCABULARY = 11
token_ids = st.integers(0, VOCABULARY - 1)


def plain(logits, params, prompt, output):
    """The definition, one token after the other."""
    bias, changed = dict(params.logit_bias), []
    for token_id, value in enumerate(logits):
        value += bias.get(token_id, 0.0)
        if len(output) < params.min_tokens and token_id in params.stop_token_ids:
            value = -math.inf
        if token_id in prompt or token_id in output:
            divided = value / params.repetition_penalty
            value = divided if value > 0 else value * params.repetition_penalty
        times = output.count(token_id)
        value -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
        changed.append(value)
    return changed


@given(
    st.builds(
        SamplingParams,
        stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
        min_tokens=st.integers(0, 6),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        presence_penalty=st.sampled_from([0.0, -1.5, 0.75]),
        frequency_penalty=st.sampled_from([0.0, -0.5, 0.25]),
        logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32)).map(
            lambda bias: tuple(bias.items())
        ),
    ),
    st.lists(token_ids, min_size=1, max_size=8),
    st.lists(token_ids, max_size=8),
    st.randoms(),
)
def test_every_change_is_what_its_definition_says(params, prompt, output, draw):
    logits = [draw.uniform(-5, 5) for _ in range(VOCABULARY)]
    rows = torch.tensor([logits, logits])
    untouched = rows.clone()
    changed = changed_logits(
        rows, [params, SamplingParams()], [History(prompt, output), History(prompt, output)]
    )
    assert changed[0].tolist() == pytest.approx(plain(logits, params, prompt, output), abs=1e-4)
    assert torch.equal(changed[1], untouched[1])
    assert torch.equal(rows, untouched)


def test_nothing_is_copied_when_nobody_asks():
    rows = torch.zeros(2, VOCABULARY)
    assert changed_logits(rows, [SamplingParams()] * 2, [None, None]) is rows


def test_half_precision_rows_are_changed_in_single():
    rows = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
    changed = changed_logits(rows, [SamplingParams(logit_bias=((3, 0.001),))], [None])
    assert changed.dtype == torch.float32
    assert changed[0, 3].item() == pytest.approx(0.001)


def test_log_probabilities_are_those_of_the_softmax_likeliest_first():
    draw = random.Random(1)
    logits = torch.tensor([draw.uniform(-3, 3) for _ in range(VOCABULARY)])
    expected = logits.double().log_softmax(dim=-1)
    order = sorted(range(VOCABULARY), key=lambda i: -expected[i].item())
    other, logprobs = logprobs_of(torch.stack([logits.flip(0), logits]), [7, 4], 3)
    assert logprobs.chosen == pytest.approx(expected[4].item(), abs=1e-5)
    assert [token_id for token_id, _ in logprobs.top] == order[:3]
    assert [value for _, value in logprobs.top] == pytest.approx(
        [expected[i].item() for i in order[:3]], abs=1e-5
    )
    assert other.chosen == pytest.approx(expected[VOCABULARY - 1 - 7].item(), abs=1e-5)


def test_more_alternatives_than_tokens_are_all_tokens():
    assert [len(each.top) for each in logprobs_of(torch.zeros(1, 3), [0], 20)] == [3]
