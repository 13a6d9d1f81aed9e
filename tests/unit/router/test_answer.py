"""Tokens in order and exactly once, whatever overtakes what; phases from who measured them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvariantBroken, PeerLost
from core.request import FinishReason, Resumption, Usage
from core.request_state import RequestState
from core.worker import RequestFailed
from router.answer import Answer
from router.placing.placement import Placement
from router.placing.recovery import Failure
from tests.unit.router.doubles import (
    DONE,
    FIRST,
    PREFILL_REPORT,
    TRANSFER_REPORT,
    make_request,
    reserved,
    token,
)

RESUMED = Resumption((7, 8))
MOVED = Placement("prefill-0", "decode-0", "because")
LOCAL = Placement(None, "decode-0", "because")


def placed(placement=MOVED, **sampling):
    answer = Answer(make_request(**sampling), received_s=10.0, tokenize_s=0.25)
    answer.attempt(placement, 10.5)
    return answer


def receiving(placement=MOVED, **sampling):
    answer = placed(placement, **sampling)
    answer.take(reserved(), 11.0)
    return answer


def deliver(answer, now_s=20.0):
    tokens = answer.take_undelivered()
    if tokens:
        answer.delivered(now_s)
    return [token.token_id for token in tokens]


class TestResumedByTheClient:
    def test_the_answer_goes_on_behind_what_the_client_has(self):
        request = replace(make_request(max_tokens=4), resumption=RESUMED, mark="mark-")
        answer = Answer(request, received_s=10.0, tokenize_s=0.25)
        attempt = answer.attempt(LOCAL, 10.5)
        assert attempt.request_id == "r~mark-1"
        assert attempt.prompt_token_ids == (*request.prompt_token_ids, 7, 8)
        assert (attempt.num_resumed_tokens, attempt.sampling.max_tokens) == (2, 2)
        answer.take(reserved(), 11.0)
        answer.take(token(0, prefill=PREFILL_REPORT), 12.0)
        answer.take(token(1, done=DONE), 13.0)
        assert deliver(answer) == [100, 101]
        usage = answer.completion(20.0).usage
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (6, 4)

    def test_an_answer_that_the_client_has_whole_needs_no_worker(self):
        request = replace(make_request(max_tokens=2), resumption=RESUMED)
        answer = Answer(request, received_s=10.0, tokenize_s=0.25)
        assert answer.is_complete
        record = answer.completion(11.0)
        assert (record.finish_reason, record.usage.num_output_tokens) == (FinishReason.LENGTH, 2)
        assert (record.prefill_worker, record.decode_worker) == ("", "")
        assert record.phases.unaccounted_s == pytest.approx(0.0)


class TestOrder:
    def test_the_first_token_goes_out_before_decode_has_begun(self):
        answer = receiving()
        answer.take(FIRST, 12.0)
        assert deliver(answer) == [100]
        assert not answer.is_complete

    def test_decodes_token_that_overtakes_prefills_first_waits_for_its_turn(self):
        answer = receiving()
        answer.take(token(1), 12.0)
        assert deliver(answer) == []
        answer.take(FIRST, 12.5)
        assert deliver(answer) == [100, 101]

    def test_a_token_that_comes_twice_is_delivered_once(self):
        answer = receiving()
        for event in (FIRST, token(1), token(1), FIRST):
            answer.take(event, 12.0)
        assert deliver(answer) == [100, 101]
        answer.take(token(1), 12.0)
        assert deliver(answer) == []
        assert answer.log == [100, 101]

    @given(st.permutations(range(6)), st.lists(st.booleans(), min_size=6, max_size=6))
    def test_any_order_of_arrival_gives_the_same_answer(self, order, delivers):
        answer = receiving(max_tokens=6)
        delivered = []
        for index, is_delivered in zip(order, delivers, strict=True):
            event = FIRST if index == 0 else token(index, done=DONE if index == 5 else None)
            answer.take(event, 12.0)
            if is_delivered:
                delivered += deliver(answer)
        delivered += deliver(answer)
        assert delivered == answer.log == [100, 101, 102, 103, 104, 105]
        answer.take(TRANSFER_REPORT, 13.0)
        assert answer.is_complete


class TestTheEnd:
    def test_a_moved_answer_is_complete_with_its_last_token_and_the_transfers_report(self):
        answer = receiving()
        for event in (FIRST, token(1), token(2, done=DONE)):
            answer.take(event, 12.0)
        assert not answer.is_complete
        deliver(answer)
        assert not answer.is_complete
        answer.take(TRANSFER_REPORT, 13.0)
        assert answer.is_complete

    def test_it_is_not_complete_before_the_last_token_was_delivered(self):
        answer = receiving()
        for event in (FIRST, TRANSFER_REPORT, token(1), token(2, done=DONE)):
            answer.take(event, 12.0)
        assert not answer.is_complete
        deliver(answer)
        assert answer.is_complete

    @pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"stop_token_ids": (100,)}])
    def test_an_answer_of_one_token_needs_no_handoff(self, sampling):
        answer = receiving(**sampling)
        answer.take(FIRST, 12.0)
        assert deliver(answer) == [100]
        assert answer.is_complete
        completion = answer.completion(21.0)
        assert completion.transfer is None
        assert completion.usage.num_output_tokens == 1

    def test_a_local_answer_waits_for_no_transfer(self):
        answer = receiving(LOCAL, max_tokens=2)
        answer.take(token(0, prefill=PREFILL_REPORT), 12.0)
        answer.take(token(1, done=DONE), 12.5)
        deliver(answer)
        assert answer.is_complete
        completion = answer.completion(21.0)
        assert completion.prefill_worker == completion.decode_worker == "decode-0"
        assert completion.transfer is None
        assert completion.usage == Usage(6, 2, 4, 4, num_local_prefill_tokens=2)

    def test_a_stop_token_ends_it_and_is_part_of_it(self):
        answer = receiving(LOCAL, max_tokens=9, stop_token_ids=(101,))
        answer.take(token(0, prefill=PREFILL_REPORT), 12.0)
        assert not answer.is_complete
        answer.take(token(1, done=DONE), 12.0)
        assert deliver(answer) == [100, 101]
        assert answer.completion(21.0).finish_reason is FinishReason.STOP

    def test_a_failure_is_returned_as_the_worker_told_it(self):
        answer = receiving()
        error = PeerLost("decode-0", "killed")
        assert answer.take(RequestFailed("r", error), 12.0) == Failure(error, is_from_prefill=False)
        answer.fail(error, 13.0)
        assert answer.state is RequestState.FAILED

    def test_an_incomplete_answer_has_no_completion(self):
        answer = receiving()
        answer.take(token(1), 12.0)
        with pytest.raises(InvariantBroken, match="request r ended incomplete"):
            answer.completion(13.0)


class TestStates:
    def test_a_request_goes_through_its_states(self):
        answer = Answer(make_request(max_tokens=1), 10.0, 0.0)
        seen = [answer.state]
        answer.attempt(MOVED, 10.5)
        seen.append(answer.state)
        answer.take(reserved(), 11.0)
        seen.append(answer.state)
        answer.take(FIRST, 12.0)
        seen.append(answer.state)
        deliver(answer)
        answer.completion(13.0)
        assert [state.value for state in (*seen, answer.state)] == [
            "received",
            "reserving",
            "prefilling",
            "transferring",
            "finished",
        ]

    def test_a_second_grant_is_a_bug(self):
        answer = receiving()
        with pytest.raises(InvariantBroken):
            answer.take(reserved(), 12.0)


def test_the_closing_record_tells_what_each_side_measured():
    answer = receiving(max_tokens=3, seed=7)
    answer.take(FIRST, 13.0)
    deliver(answer, 13.5)
    for event in (token(1), TRANSFER_REPORT, token(2, done=DONE)):
        answer.take(event, 16.0)
    deliver(answer, 16.5)
    completion = answer.completion(17.0)
    assert completion.usage == Usage(6, 3, 4, 4, num_transferred_tokens=2)
    assert completion.transfer == TRANSFER_REPORT
    assert (completion.placement, completion.seed) == ("because", 7)
    assert (completion.prefill_worker, completion.decode_worker) == ("prefill-0", "decode-0")
    phases = completion.phases
    assert dict(phases.items()) == {
        "tokenize": 0.25,
        "place": 0.25,
        "recovery": 0.0,
        "reserve": 0.5,
        "queue": 0.5,
        "prefill": 1.5,
        "exposed_transfer": 0.25,
        "slot_wait": 0.125,
        "decode": 2.0,
        "delivery": 0.5,
    }
    assert (phases.total_s, phases.time_to_first_token_s) == (7.0, 3.5)
    assert phases.accounted_s + phases.unaccounted_s == phases.total_s


def test_a_first_token_delivered_at_time_zero_counts():
    answer = Answer(make_request(max_tokens=1), received_s=-1.0, tokenize_s=0.0)
    answer.attempt(MOVED, -1.0)
    answer.take(reserved(), -0.5)
    answer.take(FIRST, -0.5)
    deliver(answer, 0.0)
    assert answer.completion(5.0).phases.time_to_first_token_s == 1.0
