"""What the router remembers of requests that ended."""

from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.request import FinishReason
from router.telemetry.history import History
from router.timeline.record import Record
from tests.unit.core.test_diagnosis import HEALTHY, delayed

RECORD = Record(0.0, 0.0)


@pytest.fixture
def clock():
    return ManualClock()


def named(name, completion=HEALTHY):
    return replace(completion, request_id=name)


def test_the_oldest_is_forgotten_first(clock):
    history = History(2, clock)
    for name in "abc":
        history.add(named(name), RECORD)
    assert history.find("a") is None
    assert [history.find(name).completion.request_id for name in "bc"] == ["b", "c"]


def test_an_id_that_was_used_again_stands_for_its_last_request(clock):
    history = History(2, clock)
    history.add(named("a"), RECORD)
    history.add(named("b"), RECORD)
    history.add(named("a", delayed("queue")), RECORD)
    history.add(named("c"), RECORD)
    assert history.find("b") is None
    assert history.find("a").completion.phases.queue_s > 1


def test_a_request_is_held_against_what_the_others_took(clock):
    history = History(10, clock)
    for number in range(5):
        history.add(named(f"{number}"), RECORD)
    history.add(named("slow", delayed("prefill", 3.0)), RECORD)
    assert [f.phase for f in history.explain(history.find("slow"))] == ["prefill"]
    assert history.explain(history.find("0")) == []


def test_only_what_ended_well_within_the_window_counts(clock):
    history = History(10, clock)
    history.add(named("early"), RECORD)
    clock.advance(10.0)
    history.add(named("late"), RECORD)
    history.add(replace(named("failed"), finish_reason=FinishReason.ERROR), RECORD)
    assert [c.request_id for c in history.since(5.0)] == ["late"]
    assert len(history.since(float("inf"))) == 2
    assert history.find("failed") is not None
