"""The steps of an answer as few events: runs of similar ones, and gaps by name."""

import random

from core.events.event import EventKind
from decode_worker.pace import Pace
from decode_worker.runs import MAX_EVENTS
from decode_worker.step_log import StepFacts, StepLog


def events_of(lengths_s, *, prompts_at=(), num_sequences=lambda index: 1):
    """Of an answer whose steps take so long; others' prompts are read in some of them."""
    log, pace, now_s = StepLog(), Pace(began_s=10.0), 10.0
    for index, length_s in enumerate(lengths_s, start=1):
        now_s += length_s
        prompts = (("other", 100),) if index in prompts_at else ()
        log.add(StepFacts(now_s, length_s / 2, num_sequences(index), 50 + index, prompts))
        pace.token(index, log)
    return pace.report(0.0).events


def test_similar_steps_are_one_run():
    (run,) = events_of([0.02, 0.03, 0.02, 0.015] * 100)
    assert (run.kind, run.index, run.count) == (EventKind.STEPS, 1, 400)
    assert (run.begin_s, round(run.end_s, 6)) == (10.0, 18.5)
    assert (round(run.busy_s, 6), run.num_history_tokens) == (4.25, 450)


def test_another_length_begins_another_run():
    runs = events_of([0.02] * 5 + [0.045] * 5)
    assert [(run.kind, run.index, run.count) for run in runs] == [
        (EventKind.STEPS, 1, 5),
        (EventKind.STEPS, 6, 5),
    ]


def test_a_late_token_is_a_gap_that_names_whose_prompt_was_read():
    before, gap, after = events_of([0.02] * 5 + [0.5] + [0.02] * 5, prompts_at=(6,))
    assert (before.count, after.count, after.index) == (5, 5, 7)
    assert (gap.kind, gap.index, gap.count) == (EventKind.GAP, 6, 1)
    assert (gap.num_tokens, gap.request_ids) == (100, ("other",))
    assert before.end_s == gap.begin_s and gap.end_s == after.begin_s


def test_events_are_bounded_and_cover_every_step_whatever_the_machine_does():
    draw = random.Random(1)
    lengths_s = [draw.choice([0.001, 0.004, 0.02, 0.3]) for _ in range(2000)]
    events = events_of(lengths_s)
    assert len(events) <= MAX_EVENTS
    assert sum(event.count for event in events) == 2000
    assert round(sum(event.duration_s for event in events), 6) == round(sum(lengths_s), 6)
    assert all(a.end_s == b.begin_s for a, b in zip(events, events[1:], strict=False))
