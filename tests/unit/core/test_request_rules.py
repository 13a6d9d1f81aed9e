"""What a request may ask, when it ends, and which way its state may go."""

import math

import pytest

from core.errors import InvalidRequest, InvariantBroken
from core.request import MAX_SEED, FinishReason, Request, RequestId, SamplingParams
from core.request_state import TRANSITIONS, Progress, RequestState

State = RequestState
ARROWS = {
    (State.RECEIVED, State.ADMITTED),
    (State.RECEIVED, State.FINISHED),
    (State.ADMITTED, State.RESERVING),
    (State.RESERVING, State.PREFILLING),
    (State.PREFILLING, State.TRANSFERRING),
    (State.PREFILLING, State.DECODING),
    (State.TRANSFERRING, State.DECODING),
    (State.TRANSFERRING, State.FINISHED),
    (State.DECODING, State.FINISHED),
    *((state, State.FAILED) for state in State if state not in (State.FINISHED, State.FAILED)),
    (State.FAILED, State.RESERVING),
}


def request(**sampling):
    return Request(RequestId("r"), (5, 6, 7), SamplingParams(**sampling), deadline_s=1.0)


class TestSampling:
    @pytest.mark.parametrize(
        ("name", "value", "limit"),
        [
            ("max_tokens", 0, "must be at least 1"),
            ("max_tokens", -1, "must be at least 1"),
            ("temperature", -0.1, "must be 0 to 2"),
            ("temperature", 2.1, "must be 0 to 2"),
            ("temperature", math.nan, "must be 0 to 2"),
            ("temperature", math.inf, "must be 0 to 2"),
            ("top_k", -1, "must be 0 (off) or more"),
            ("top_p", 0.0, "must be over 0 and at most 1"),
            ("top_p", 1.1, "must be over 0 and at most 1"),
            ("top_p", math.nan, "must be over 0 and at most 1"),
            ("seed", -1, f"must be 0 to {MAX_SEED}"),
            ("seed", MAX_SEED + 1, f"must be 0 to {MAX_SEED}"),
        ],
    )
    def test_a_value_outside_its_range_is_refused_with_field_value_and_limit(
        self, name, value, limit
    ):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        error = caught.value
        assert (error.field, error.value, error.limit) == (name, str(value), limit)

    @pytest.mark.parametrize(
        "values",
        [
            {"max_tokens": 1},
            {"temperature": 0.0},
            {"temperature": 2.0},
            {"top_k": 0},
            {"top_p": 1.0},
            {"top_p": 1e-9},
            {"seed": 0},
            {"seed": MAX_SEED},
            {"stop_token_ids": tuple(range(64))},
        ],
    )
    def test_the_ends_of_each_range_are_taken(self, values):
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values

    def test_too_many_stop_tokens_are_refused_by_their_number(self):
        with pytest.raises(InvalidRequest, match="stop_token_ids is 1000 ids"):
            SamplingParams(stop_token_ids=tuple(range(1000)))


class TestTheEndOfAnAnswer:
    def test_a_stop_token_ends_it_even_as_the_last_that_fits(self):
        asked = request(max_tokens=2, stop_token_ids=(9,))
        assert asked.finish_reason(9, 1) is FinishReason.STOP
        assert asked.finish_reason(9, 2) is FinishReason.STOP

    def test_the_last_token_that_was_asked_for_ends_it(self):
        asked = request(max_tokens=2)
        assert asked.finish_reason(9, 1) is None
        assert asked.finish_reason(9, 2) is FinishReason.LENGTH

    def test_its_longest_form_is_prompt_and_answer(self):
        assert request(max_tokens=4).num_prompt_tokens == 3
        assert request(max_tokens=4).max_num_tokens == 7


class TestTheAutomaton:
    @pytest.mark.parametrize("target", State)
    @pytest.mark.parametrize("source", State)
    def test_every_arrow_is_allowed_or_broken_as_drawn(self, source, target):
        progress = Progress(source, [source])
        if (source, target) in ARROWS:
            progress.move(target)
            assert progress.state is target
            assert progress.history == [source, target]
        else:
            with pytest.raises(InvariantBroken, match=f"from {source.value} to {target.value}"):
                progress.move(target)
            assert progress.state is source
            assert progress.history == [source]

    def test_success_is_final_failure_may_be_tried_again_and_every_other_state_can_fail(self):
        assert TRANSITIONS[State.FINISHED] == frozenset()
        assert TRANSITIONS[State.FAILED] == {State.RESERVING}
        others = set(State) - {State.FINISHED, State.FAILED}
        assert all(State.FAILED in TRANSITIONS[state] for state in others)

    def test_a_request_starts_as_received(self):
        assert Progress().history == [State.RECEIVED]
