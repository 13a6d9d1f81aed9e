"""Who is inside can be listed, and ended by id; an id is inside once."""

import asyncio

import pytest

from core.clock import ManualClock
from core.errors import Cancelled, DuplicateRequest, Overloaded, PeerLost
from core.request import FinishReason
from core.request_state import RequestState
from router.answer import Answer
from router.keys import caller
from router.placing.placement import Placement
from router.running import RunningRequests
from tests.unit.router.doubles import make_request, token


@pytest.fixture
def running(clock):
    return RunningRequests(2, clock)


@pytest.fixture
def clock():
    return ManualClock(100.0)


def ids(running):
    return [one.request_id for one in running.oldest_first()]


async def serve(running, request_id, *, on_entered=lambda one: None):
    with running.entered(request_id, 99.0) as one:
        on_entered(one)
        await asyncio.Event().wait()


async def test_a_request_is_inside_while_it_is_served_and_its_id_is_taken(running):
    with running.entered("a", 99.0) as first, running.entered("b", 99.5):
        assert ids(running) == ["a", "b"]
        assert first.state is RequestState.RECEIVED
        with pytest.raises(DuplicateRequest) as refusal, running.entered("a", 100.0):
            pass
        assert (refusal.value.field, refusal.value.value) == ("request_id", "a")
        assert ids(running) == ["a", "b"]
    assert ids(running) == []


async def test_one_more_than_may_be_inside_is_refused_and_holds_nothing(running):
    with running.entered("a", 99.0), running.entered("b", 99.5):
        with pytest.raises(Overloaded, match="2 of 2 answers are active") as refusal:
            with running.entered("c", 100.0):
                pytest.fail("it was let in")
        assert refusal.value.retry_after_s > 0
        assert (running.num_requests, running.is_inside("c")) == (2, False)
        with pytest.raises(DuplicateRequest), running.entered("a", 100.0):
            pytest.fail("it was let in")
    with running.entered("c", 101.0):
        assert ids(running) == ["c"]
    assert running.num_requests == 0


async def test_only_the_key_that_a_request_came_with_can_cancel_it(running):
    caller.set("alice")
    task = asyncio.create_task(serve(running, "a"))
    await asyncio.sleep(0)
    caller.set("bob")
    assert not running.cancel("a")
    caller.set("alice")
    assert running.cancel("a")
    with pytest.raises(Cancelled):
        await task


async def test_cancelling_ends_the_task_with_an_error_that_tells_so_and_only_once(running):
    task = asyncio.create_task(serve(running, "a"))
    await asyncio.sleep(0)
    assert [running.cancel("a"), running.cancel("a"), running.cancel("b")] == [True, False, False]
    with pytest.raises(Cancelled, match="a was cancelled"):
        await task
    assert not running.cancel("a")
    assert ids(running) == []


async def test_a_client_that_goes_away_as_well_ends_the_task_as_cancelled(running):
    task = asyncio.create_task(serve(running, "a"))
    await asyncio.sleep(0)
    running.cancel("a")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ids(running) == []


async def test_an_error_takes_along_what_was_known_also_one_that_ends_several_requests(
    running, clock
):
    shared = PeerLost("decode-0", "killed")
    for request_id, num_tokens in (("a", 2), ("b", 1)):
        answer = Answer(make_request(request_id), 99.0, 0.25)
        answer.attempt(Placement("prefill-0", "decode-0", "the only ones"), 99.5)
        for index in range(num_tokens):
            answer.take(token(index, request_id=request_id), 99.75)
        answer.take_undelivered()
        answer.delivered(100.0)
        with pytest.raises(PeerLost) as failure, running.entered(request_id, 99.0) as one:
            one.answers.append(answer)
            raise shared
        known = failure.value.completion
        assert (known.request_id, known.finish_reason) == (request_id, FinishReason.ERROR)
        assert known.usage.num_output_tokens == num_tokens
        assert (known.prefill_worker, known.decode_worker) == ("prefill-0", "decode-0")
        assert (known.phases.tokenize_s, known.phases.total_s) == (0.25, 1.0)


async def test_before_it_is_dispatched_nothing_is_known_of_its_answer(running):
    with pytest.raises(PeerLost) as failure, running.entered("a", 99.0):
        raise PeerLost("cluster", "empty")
    assert failure.value.completion is None
