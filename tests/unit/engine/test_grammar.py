"""What a grammar leaves depends on it and the answer alone, however the answer came."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from core.errors import InvalidRequest
from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.sampling.grammar import MAX_MATCHERS, Grammars
from engine.sampling.logits import History
from tests.tiny_model import END_OF_TEXT_ID, IM_END_ID, write_tiny_model

VOCABULARY = 512
STOPS = (END_OF_TEXT_ID, IM_END_ID)
DIGITS = LLMatcher.grammar_from_regex("[0-9]{2,3}")
SCHEMA = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture
def grammars(directory):
    return Grammars(directory, VOCABULARY)


def step(grammar, answer, stops=STOPS):
    params = SamplingParams(grammar=grammar, stop_token_ids=stops)
    return SequenceStep([1], 0, [0], params, History([1], list(answer)))


def allowed(grammars, grammar, answer=()):
    mask = grammars.masks([step(grammar, answer)])[0].result()
    assert isinstance(mask, np.ndarray), mask
    assert mask.shape == (VOCABULARY,)
    return set(np.flatnonzero(mask).tolist())


def test_only_tokens_that_can_still_match_are_left(grammars, tokenizer):
    first = allowed(grammars, DIGITS)
    assert first
    assert all(tokenizer.decode([i]).isdigit() for i in first)
    three = tokenizer.encode("123", add_special_tokens=False).ids
    assert allowed(grammars, DIGITS, three) == set(STOPS)


def test_an_answer_step_by_step_and_all_at_once_leave_the_same(directory, tokenizer):
    stepwise, draw = Grammars(directory, VOCABULARY), random.Random(4)
    answer = []
    for _ in range(40):
        left = allowed(stepwise, SCHEMA, answer)
        assert left == allowed(Grammars(directory, VOCABULARY), SCHEMA, answer)
        choices = sorted(left - set(STOPS))
        if not choices:
            break
        answer.append(draw.choice(choices))
    assert len(answer) > 5


def test_two_answers_to_one_grammar_do_not_disturb_each_other(grammars, tokenizer):
    one = tokenizer.encode("1", add_special_tokens=False).ids
    for _ in range(2):
        both = grammars.masks([step(DIGITS, one), step(DIGITS, ())])
        for_one, for_none = (set(np.flatnonzero(both[i].result()).tolist()) for i in (0, 1))
        assert not for_one & set(STOPS) and not for_none & set(STOPS)
    assert allowed(grammars, DIGITS, one * 2) >= set(STOPS)


def test_only_steps_with_a_grammar_have_a_mask(grammars):
    plain = SequenceStep([1], 0, [0], SamplingParams())
    chunk = SequenceStep([1], 0, [0], None)
    assert set(grammars.masks([plain, step(DIGITS, ()), chunk])) == {1}


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("((("),
        LLMatcher.grammar_from_lark("nothing"),
        LLMatcher.grammar_from_json_schema({"type": "nothing"}),
    ],
    ids=["regex", "lark", "schema"],
)
def test_what_cannot_be_used_fails_that_request_alone(grammars, grammar):
    masks = grammars.masks([step(grammar, ()), step(DIGITS, ())])
    assert isinstance(masks[0].result(), InvalidRequest)
    assert isinstance(masks[1].result(), np.ndarray)


def test_an_answer_that_breaks_its_grammar_is_named(grammars, tokenizer):
    letters = tokenizer.encode("x", add_special_tokens=False).ids
    error = grammars.masks([step(DIGITS, letters)])[0].result()
    assert isinstance(error, InvalidRequest)


def test_matchers_that_nobody_uses_are_forgotten(grammars):
    texts = [LLMatcher.grammar_from_regex(f"[0-9]{{{n}}}") for n in range(1, MAX_MATCHERS + 20)]
    for grammar in texts:
        assert allowed(grammars, grammar)
    assert len(grammars._matchers) == MAX_MATCHERS
