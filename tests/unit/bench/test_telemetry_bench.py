"""What telemetry costs is told by neighbouring steps with and without it, and how surely."""

import math
import random
import sys

import pytest

from bench.telemetry import __main__ as telemetry
from bench.telemetry import direct
from bench.telemetry.__main__ import Estimate, Loop, Pair, Switched, Taken, measure
from core.events.step import StepFacts
from decode_worker.step_log import StepLog
from tests.tiny_model import write_tiny_model


def pair(seconds, *, has_on=True, cost=0.0):
    return Pair(has_on, Taken(seconds * (1 + cost), 1.0), Taken(seconds, 1.0))


def test_a_machine_that_gets_slower_is_no_cost_and_bounds_hold_the_true_one():
    draw = random.Random(1)
    pairs = [pair(1.0 + i / 100, cost=draw.gauss(0.005, 0.05)) for i in range(1000)]
    estimate = Estimate.of([each.cost(lambda taken: taken.seconds) for each in pairs])
    assert estimate.low < 0.005 < estimate.high
    assert estimate.high - estimate.low < 0.01
    assert estimate.low < estimate.median < estimate.high


@pytest.mark.parametrize("num_values", [9, 20, 200, 601])
def test_the_bounds_hold_the_median_in_95_of_100_draws(num_values):
    # The k-th smallest value is above the median as often as fewer than k of all lie below it.
    low = int(Estimate.of(range(num_values)).low)
    misses = 2 * sum(math.comb(num_values, k) for k in range(low + 1)) / 2**num_values
    assert 0.02 < misses <= 0.05


def test_the_report_keeps_pairs_without_it_apart_and_sets_the_direct_measure_beside(monkeypatch):
    monkeypatch.setattr(telemetry, "recording_us", lambda num_sequences: 2.0 * num_sequences)
    monkeypatch.setattr(telemetry, "message_us", lambda: 3.0)
    monkeypatch.setattr(telemetry, "ending_us", lambda: 7.0)
    pairs = [pair(1.0, cost=0.02)] * 9 + [pair(1.0, has_on=False, cost=-0.01)] * 5
    found = {row.name: row.value for row in telemetry.rows(pairs, 10, scrape_s=0.006)}
    assert found["decode step of 10, telemetry off"] == pytest.approx(1000.0)
    assert found["time of a step, on against off"] == pytest.approx(2.0)
    assert found["time of a step, on against off, at most"] == pytest.approx(2.0)
    assert found["time of a step, off against off"] == pytest.approx(-1.0)
    assert found["processor time of a step, on against off"] == pytest.approx(0.0)
    # 20 us of recording and 30 us of messages, of a step of one second
    assert found["recorded for a step of 10"] == pytest.approx(0.005)


def test_a_step_without_it_is_told_afterwards_so_that_no_gap_grows():
    switch, log = Switched(token_bytes=1), StepLog()
    pace = switch.pace(0.0)
    for number in range(1, 41):
        switch.is_on = number % 3 == 0
        switch.step(log, StepFacts(float(number), 0.9, 1, number, ()))
        pace.token(number, log)
        switch.catch_up()
    report = pace.report(slot_wait_s=0.0)
    assert report.longest_gap.gap_s == pytest.approx(1.0)
    assert report.step_s == pytest.approx(40 * 0.9)


def test_a_real_worker_is_measured(tmp_path):
    loop = Loop(write_tiny_model(tmp_path))
    pairs = measure(loop, 70, 4)  # more than one group of streams
    assert len(pairs) == 70
    assert {each.has_on for each in pairs} == {True, False}
    assert all(taken.seconds > 0 for each in pairs for taken in (each.other, each.off))
    assert loop.scrape_s() > 0


def test_what_a_step_costs_counts_for_the_pairs_that_have_it(tmp_path, monkeypatch):
    def step(self, *, is_on):
        return Taken(1.1 if is_on else 1.0, 1.0)

    monkeypatch.setattr(Loop, "step", step)
    loop = Loop(write_tiny_model(tmp_path))
    pairs = [loop.pair() for _ in range(50)]
    costs = {pair.has_on: pair.cost(lambda taken: taken.seconds) for pair in pairs}
    assert costs == {True: pytest.approx(0.1), False: 0.0}
    assert all(pair.cost(lambda taken: taken.seconds) >= 0 for pair in pairs)


@pytest.mark.parametrize("words", ["--pairs 49", "--streams 0", "--streams 65"])
def test_numbers_that_cannot_be_measured_are_refused(tmp_path, monkeypatch, capsys, words):
    model = str(write_tiny_model(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench.telemetry", model, *words.split()])
    with pytest.raises(SystemExit):
        telemetry.main()
    assert words.replace(" ", " is ") in capsys.readouterr().err


def test_as_many_streams_as_are_allowed_all_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "KV_CACHE_BYTES", 4 << 20)
    loop = Loop(write_tiny_model(tmp_path))
    assert 1 < loop.max_streams < 64
    assert len(measure(loop, 61, loop.max_streams)) == 61


def test_recording_costs_something_and_more_for_more_sequences(monkeypatch):
    monkeypatch.setattr(direct, "NUM_CALLS", 50)
    monkeypatch.setattr(direct, "NUM_REPEATS", 5)
    assert 0 < direct.recording_us(1) < direct.recording_us(64)
    assert direct.message_us() > 0
    assert direct.ending_us() > 0
