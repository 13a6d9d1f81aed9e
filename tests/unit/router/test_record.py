"""What the router notes of an answer makes phases and events that agree."""

from dataclasses import replace

import pytest

from core.errors import PeerLost
from core.events.event import ROUTER, Event, EventKind
from core.timeline import DecodeReport, PrefillReport, TransferReport
from router.answer import Answer
from router.placing.placement import Placement
from router.timeline.record import MAX_EVENTS, Record
from tests.unit.router.doubles import DONE, FIRST, make_request, reserved, token

PLACED = Placement("prefill-0", "decode-0", "it was idle")


def on(worker, kind, begin_s, end_s, **numbers):
    return Event(kind, begin_s, end_s, worker, uncertainty_s=0.1, **numbers)


def spans(events, kind):
    return [(event.begin_s, event.end_s) for event in events if event.kind is kind]


@pytest.fixture
def record():
    """Of an answer from 10.0 to 30.0, which one attempt made."""
    record = Record(10.0, tokenize_s=1.0)
    record.placed(13.0, "it was idle")
    record.reserved(13.5)
    record.token_arrived(20.0, is_first=True)
    record.delivered(20.25)
    record.token_arrived(22.0, is_first=False)
    record.delivered(24.0)
    record.token_arrived(29.0, is_first=False)
    record.delivered(29.0625)
    return record


def test_each_phase_is_the_length_of_its_event(record):
    phases = record.phases(PrefillReport(0.0, 0.0, 0, 0), None, DecodeReport(0.0, 0.0), 30.0)
    events = record.events(phases.total_s)
    length_s = {event.kind: event.duration_s for event in events}
    assert length_s[EventKind.TOKENIZE] == phases.tokenize_s == 1.0
    assert length_s[EventKind.LINE] == phases.place_s == 2.0
    assert length_s[EventKind.RESERVE] == phases.reserve_s == 0.5
    assert length_s[EventKind.LAST_TOKEN] == phases.delivery_s == 0.0625
    assert spans(events, EventKind.FIRST_TOKEN) == [(20.0, 10.0 + phases.time_to_first_token_s)]
    assert spans(events, EventKind.RECEIVED) == [(10.0, 10.0)]
    assert spans(events, EventKind.END) == [(30.0, 30.0)]
    assert {event.where for event in events} == {ROUTER}


def test_deliveries_are_one_event_and_each_slow_one_its_own(record):
    events = record.events(20.0)
    assert spans(events, EventKind.DELIVERIES) == [(20.25, 29.0625)]
    assert spans(events, EventKind.SLOW_DELIVERY) == [(22.0, 24.0)]
    assert [e.count for e in events if e.kind is EventKind.DELIVERIES] == [3]


def test_events_are_in_order_and_a_running_request_has_no_end(record):
    events = record.events(None)
    assert [event.begin_s for event in events] == sorted(event.begin_s for event in events)
    assert spans(events, EventKind.END) == []


def test_a_failed_attempt_is_told_and_the_next_one_waits_from_there():
    record = Record(10.0, 0.5)
    record.placed(11.0, "first")
    record.failed(14.0, PeerLost("decode-0", "killed"))
    record.placed(15.0, "second")
    events = record.events(8.0)
    (failed,) = [event for event in events if event.kind is EventKind.FAILED]
    assert (failed.begin_s, failed.end_s, failed.attempt) == (11.0, 14.0, 1)
    assert "killed" in failed.note
    assert spans(events, EventKind.LINE) == [(10.5, 11.0), (14.0, 15.0)]
    assert [e.note for e in events if e.kind is EventKind.PLACED] == ["first", "second"]


def test_an_answer_whose_attempts_never_end_does_not_fill_the_memory():
    record = Record(0.0, 0.0)
    for number in range(MAX_EVENTS):
        record.placed(number, "again")
        record.failed(number, PeerLost("decode-0", "stopping"))
    assert len(record.events(None)) == MAX_EVENTS


def test_workers_events_come_with_their_reports_in_the_words_of_the_client():
    answer = Answer(make_request(max_tokens=4), received_s=0.0, tokenize_s=0.0)
    answer.attempt(PLACED, 1.0)
    answer.take(reserved(), 1.0)
    answer.take(FIRST, 2.0)
    answer.fail(PeerLost("decode-0", "killed"), 3.0)
    answer.attempt(PLACED, 3.0)
    answer.take(reserved(), 3.0)
    chunk = on("prefill-0", EventKind.CHUNK, 3.0, 4.0)
    report = replace(FIRST.report, events=(chunk,))
    answer.take(replace(FIRST, report=report), 4.0)
    push = on("prefill-0", EventKind.PUSH, 3.5, 4.5)
    answer.take(TransferReport("shm", 10, 1, 1.0, 0.5, (push,)), 5.0)
    gap = on("decode-0", EventKind.GAP, 5.0, 6.0, index=1, request_ids=("other~2", "other"))
    done = replace(DONE, report=DecodeReport(0.5, 1.0, events=(gap,)))
    answer.take(token(1, done=done), 6.0)
    answer.take(token(2, done=done), 6.0)
    answer.take_undelivered()
    answer.delivered(6.0)
    events = answer.record.events(7.0)
    told = {event.kind: event for event in events if event.where != ROUTER}
    assert told[EventKind.CHUNK] == replace(chunk, attempt=2)
    assert told[EventKind.PUSH] == replace(push, attempt=2)
    assert told[EventKind.GAP] == replace(gap, attempt=2, index=2, request_ids=("other",))
