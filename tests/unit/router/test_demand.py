"""What the router tells those who scale pools."""

import pytest

from core.request import Priority
from router.placing.demand import DemandMeter
from router.placing.fairness import Ticket


def ticket(arrived_s, num_prompt_tokens=10):
    return Ticket("client", Priority.NORMAL, False, num_prompt_tokens, 20, arrived_s)


def test_a_rate_counts_from_the_start_of_the_router():
    meter = DemandMeter(100.0)
    for number in range(20):
        meter.arrived(100.0 + number / 2)
    demand = meter.snapshot([], 110.0, is_idle=True)
    assert demand.requests_per_s == pytest.approx(2.0)
    assert demand.arrival_scv == pytest.approx(0.0)  # one each half second
    assert meter.snapshot([], 200.0, is_idle=True).requests_per_s == 0.0


def test_few_arrivals_count_as_random():
    meter = DemandMeter(0.0)
    for then_s in (0.0, 0.1, 5.0):
        meter.arrived(then_s)
    assert meter.snapshot([], 5.0, is_idle=True).arrival_scv == 1.0


def test_the_line_is_told_with_its_oldest():
    demand = DemandMeter(0.0).snapshot([ticket(3.0), ticket(1.0, 30)], 5.0, is_idle=False)
    assert (demand.num_in_line, demand.num_line_tokens, demand.oldest_in_line_s) == (2, 40, 4.0)


def test_nobody_is_idle_while_something_waits_or_runs():
    meter = DemandMeter(0.0)
    meter.arrived(10.0)
    assert meter.snapshot([], 50.0, is_idle=False).idle_s == 0.0
    assert meter.snapshot([ticket(10.0)], 60.0, is_idle=True).idle_s == 0.0
    assert meter.snapshot([], 75.0, is_idle=True).idle_s == 15.0


def test_what_was_measured_of_prompts_and_answers_has_mean_and_spread():
    meter = DemandMeter(0.0)
    for num_tokens, decode_s in ((100, 1.0), (300, 3.0)):
        meter.read(num_tokens, 1.0)
        meter.answered(decode_s, 1.0)
    demand = meter.snapshot([], 2.0, is_idle=True)
    assert demand.num_prompt_tokens.mean == 200
    assert demand.decode_s.scv == pytest.approx(0.25)
    assert meter.snapshot([], 99.0, is_idle=True).decode_s is None
