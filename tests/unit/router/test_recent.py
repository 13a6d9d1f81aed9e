"""What was delivered lately: by slots, exactly in counts and within 3 % in seconds."""

import random
from statistics import quantiles

import pytest

from router.telemetry.recent import NUM_SLOTS, SLOT_S, Quantiles, Recent

WITHIN = 0.03


@pytest.fixture
def recent():
    return Recent()


def test_tokens_of_prompts_and_answers_are_counted_apart_in_their_slots(recent):
    recent.first_tokens(0.5, num_prompt=100, num_output=1, now_s=0.1)
    recent.more_tokens(0.02, num_output=3, now_s=0.2)
    recent.more_tokens(0.02, num_output=2, now_s=SLOT_S + 0.1)
    slots = recent.slots(2 * SLOT_S)
    assert len(slots) == NUM_SLOTS
    assert [slot.num_prompt_tokens for slot in slots[-2:]] == [100, 0]
    assert [slot.num_output_tokens for slot in slots[-2:]] == [4, 2]
    assert sum(slot.num_output_tokens for slot in slots[:-2]) == 0


def test_a_slot_is_told_once_it_is_over(recent):
    recent.more_tokens(0.02, num_output=5, now_s=0.1)
    assert recent.slots(0.2)[-1].num_output_tokens == 0
    assert recent.lately(3, 0.2).num_output_tokens == 0
    assert recent.lately(3, SLOT_S).num_output_tokens == 5


def test_quantiles_are_those_of_the_values(recent):
    draw = random.Random(1)
    values = [draw.lognormvariate(-4, 1) for _ in range(2000)]
    for value in values:
        recent.more_tokens(value, num_output=1, now_s=0.0)
    cuts = quantiles(values, n=100)
    told = recent.lately(1, SLOT_S).itl
    expected = (cuts[49], cuts[94], cuts[98])
    assert (told.p50_s, told.p95_s, told.p99_s) == pytest.approx(expected, rel=WITHIN)


def test_what_was_not_measured_is_unknown_and_no_wait_is_too_short_or_long(recent):
    recent.more_tokens(0.0, num_output=1, now_s=0.0)
    recent.first_tokens(1e5, num_prompt=1, num_output=1, now_s=SLOT_S)
    first, second = recent.slots(2 * SLOT_S)[-2:]
    assert first.ttft == second.itl == Quantiles()
    assert 0 < first.itl.p50_s < 1e-4
    assert second.ttft.p99_s == pytest.approx(1e5, rel=WITHIN)


def test_only_the_last_slots_are_kept_and_idle_time_costs_nothing(recent):
    for number in range(3 * NUM_SLOTS):
        recent.more_tokens(0.01, num_output=1, now_s=number * SLOT_S)
    now_s = 3 * NUM_SLOTS * SLOT_S
    assert sum(slot.num_output_tokens for slot in recent.slots(now_s)) == NUM_SLOTS
    assert sum(slot.num_output_tokens for slot in recent.slots(now_s + 1e6)) == 0
    assert recent.lately(NUM_SLOTS, now_s).num_output_tokens == NUM_SLOTS
