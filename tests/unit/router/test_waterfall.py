"""One request in rows: what each phase took as everywhere, and its events where they were."""

import json
from dataclasses import asdict, replace

import pytest

from core.events.event import ROUTER, Event, EventKind
from core.request_state import RequestState
from core.timeline import Phases
from router.page.waterfall import MAX_GAPS, waterfall_of, waterfall_so_far
from tests.unit.core.test_diagnosis import HEALTHY

PREFILL, DECODE = "prefill-0", "decode-0"
BEGIN_S = 1000.0


def event(kind, begin_s, end_s, where=ROUTER, **numbers):
    return Event(kind, BEGIN_S + begin_s, BEGIN_S + end_s, where, **numbers)


def gap(begin_s, end_s, index=7, **numbers):
    return event(EventKind.GAP, begin_s, end_s, DECODE, index=index, num_sequences=4, **numbers)


EVENTS = (
    event(EventKind.RECEIVED, 0.0, 0.0),
    event(EventKind.TOKENIZE, 0.0, 0.002),
    event(EventKind.LINE, 0.002, 0.003),
    event(EventKind.PLACED, 0.003, 0.003),
    event(EventKind.RESERVE, 0.003, 0.006),
    event(EventKind.QUEUE, 0.007, 0.027, PREFILL),
    event(EventKind.CHUNK, 0.027, 0.3, PREFILL, num_tokens=256),
    event(EventKind.PUSH, 0.2, 0.32, PREFILL, num_bytes=2_000_000, num_layers=30),
    event(EventKind.CHUNK, 0.3, 0.527, PREFILL, index=1, num_tokens=244),
    event(EventKind.TRANSFER, 0.527, 0.531, PREFILL, uncertainty_s=0.01),
    event(EventKind.FIRST_TOKEN, 0.529, 0.53),
    event(EventKind.SLOT_WAIT, 0.531, 0.551, DECODE),
    event(EventKind.STEPS, 0.551, 1.0, DECODE, index=1, count=20, num_sequences=3),
    event(EventKind.STEPS, 1.0, 1.751, DECODE, index=21, count=20, num_sequences=4),
    event(EventKind.DELIVERIES, 0.53, 1.755, count=41),
    event(EventKind.LAST_TOKEN, 1.754, 1.755),
    event(EventKind.END, 1.76, 1.76),
)


def rows_of(told):
    return {row.phase: row for row in told.rows}


def test_what_a_row_took_is_the_phase_and_its_bars_are_the_events():
    told = waterfall_of(HEALTHY, EVENTS, ())
    rows = rows_of(told)
    phases = dict(HEALTHY.phases.items())
    assert {name: row.seconds for name, row in rows.items() if name in phases} == {
        name: seconds for name, seconds in phases.items() if seconds > 0
    }
    first, second = rows["prefill"].bars
    assert (first.begin_s, first.seconds) == pytest.approx((0.027, 0.273))
    assert (second.begin_s, second.seconds) == pytest.approx((0.3, 0.227))
    assert rows["prefill"].bars[1].what == "chunk 2: 244 tokens on prefill-0"
    assert rows["prefill"].note == "2 chunks with 500 tokens"
    assert rows["push"].note == "1 piece with 2.00 MB"
    assert rows["push"].bars[0].what == "layers 0 to 29, 2000000 bytes"
    assert rows["decode"].note == "40 steps of at most 4 sequences"
    assert rows["unaccounted"].bars == ()
    assert told.uncertainty_s == 0.01
    assert json.loads(json.dumps(asdict(told), allow_nan=False))["transfer"]["events"] == []


def test_rows_come_in_the_order_in_which_phases_happen():
    names = [row.phase for row in waterfall_of(HEALTHY, EVENTS, ()).rows]
    before = ["tokenize", "place", "reserve", "queue", "prefill", "push", "exposed_transfer"]
    assert names == [*before, "slot_wait", "decode", "delivery", "unaccounted"]


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        (
            {"num_tokens": 300, "request_ids": ("a", "b"), "busy_s": 0.5},
            "300 prompt tokens of a, b were read",
        ),
        ({"num_tokens": 300}, "300 prompt tokens were read"),
        ({"busy_s": 0.4}, "one decode step of 4 sequences took 0.400 s"),
        ({"busy_s": 0.1}, "the worker's steps took 0.100 s of it; else it stood still"),
    ],
)
def test_a_gap_is_where_it_was_and_names_what_ran_in_it(numbers, what):
    told = waterfall_of(HEALTHY, (*EVENTS, gap(0.6, 1.1, **numbers)), ())
    assert [(one.index, one.what_ran) for one in told.gaps] == [(7, what)]
    assert (told.gaps[0].begin_s, told.gaps[0].seconds) == pytest.approx((0.6, 0.5))
    assert what in [bar.what for bar in rows_of(told)["decode"].bars]


def test_of_many_gaps_the_longest_are_named_in_their_order():
    many = [gap(n, n + 0.01 * (n % 10 + 1), index=n) for n in range(1, 40)]
    told = waterfall_of(HEALTHY, (*EVENTS, *many), ())
    assert len(told.gaps) == MAX_GAPS
    assert [one.index for one in told.gaps] == [8, 9, 18, 19, 29, 39]


def test_failed_attempts_and_the_waits_after_them_are_recovery():
    again = (
        event(EventKind.FAILED, 0.003, 0.5, note="decode-1 is lost"),
        event(EventKind.LINE, 0.5, 0.7, attempt=2),
    )
    phases = replace(HEALTHY.phases, recovery_s=0.697)
    told = waterfall_of(replace(HEALTHY, phases=phases), (*EVENTS, *again), ())
    bars = rows_of(told)["recovery"].bars
    assert [bar.what for bar in bars] == ["attempt 1: decode-1 is lost", "line"]
    assert len(rows_of(told)["place"].bars) == 1


def test_an_answer_that_the_router_ended_shows_its_deliveries_as_decode():
    steps = (EventKind.STEPS, EventKind.GAP)
    told = waterfall_of(HEALTHY, [one for one in EVENTS if one.kind not in steps], ())
    [bar] = rows_of(told)["decode"].bars
    assert (bar.begin_s, bar.begin_s + bar.seconds) == pytest.approx((0.53, 1.755))


def test_of_a_running_request_the_phase_that_it_is_in_ends_now():
    phases = Phases(tokenize_s=0.002, place_s=0.001, reserve_s=0.003, total_s=2.0)
    known = replace(HEALTHY, phases=phases, decode=None, transfer=None)
    told = waterfall_so_far(known, EVENTS[:5], RequestState.PREFILLING)
    assert (told.state, told.ttft_s, told.gaps) == ("queue_or_prefill", None, ())
    *_, last = told.rows
    assert (last.phase, last.bars[-1].what) == ("queue_or_prefill", "so far")
    assert last.bars[-1].begin_s + last.bars[-1].seconds == pytest.approx(2.0)
    assert last.seconds == pytest.approx(1.994)


def test_of_a_running_request_what_was_delivered_hides_nothing():
    known = replace(HEALTHY, decode=None)
    told = waterfall_so_far(known, EVENTS[:-3] + EVENTS[-3:-1], RequestState.DECODING)
    assert told.state == "decode"
    assert rows_of(told)["decode"].bars[-1].what == "so far"
    assert "unaccounted" not in rows_of(told)
