"""The metric code of the comparison: definitions, and two public timing logs as an oracle."""

import csv
from pathlib import Path

import pytest

from bench.compare.metrics import (
    Alone,
    Goodput,
    Latencies,
    Timing,
    goodput,
    percentile,
    span_s,
    tokens_per_s,
)

TIMINGS = Path(__file__).parents[3] / "data" / "timings"


def logged(name: str) -> list[Timing]:
    with (TIMINGS / f"vllm_{name}.csv").open(encoding="utf-8") as lines:
        return [
            Timing(
                float(row["queued_s"]),
                float(row["first_token_s"]),
                float(row["last_token_s"]),
                int(row["input_tokens"]),
                int(row["output_tokens"]),
            )
            for row in csv.DictReader(lines)
        ]


def answer(due_s: float, *tokens_s: float, num_prompt_tokens: int = 10) -> Timing:
    gaps = tuple(b - a for a, b in zip(tokens_s, tokens_s[1:], strict=False))
    return Timing(due_s, tokens_s[0], tokens_s[-1], num_prompt_tokens, len(tokens_s), gaps)


@pytest.mark.parametrize(
    ("name", "ttft_s", "tpot_ms", "e2e_s", "rate"),
    [
        (
            "rtx4090",
            (60.1, 121, 137.36, 65.46),
            (30.8, 38.1, 56.0, 32.4),
            (83, 142, 154, 86.6),
            1066,
        ),
        (
            "rtxpro6000",
            (9.4, 16.9, 19.8, 7.1),
            (33.4, 36.5, 37.3, 32.5),
            (29.6, 35.5, 37.6, 28.2),
            2969,
        ),
    ],
)
def test_the_numbers_of_a_public_log_are_those_that_were_published(
    name, ttft_s, tpot_ms, e2e_s, rate
):
    timings = logged(name)

    found = Latencies.of(timings)

    def of(spread, scale=1.0):
        return [x * scale for x in (spread.p50, spread.p90, spread.p99, spread.mean)]

    assert of(found.ttft_s) == pytest.approx(ttft_s, rel=0.006)
    assert of(found.tpot_s, 1e3) == pytest.approx(tpot_ms, rel=0.006)
    assert of(found.e2e_s) == pytest.approx(e2e_s, rel=0.006)
    assert tokens_per_s(timings) == pytest.approx(rate, rel=0.001)


def test_the_times_count_from_when_the_answer_was_due():
    timing = answer(10.0, 12.0, 12.5, 13.5)

    assert timing.ttft_s == 2.0
    assert timing.tpot_s == 0.75
    assert timing.e2e_s == 3.5
    assert timing.own_itl_p99_s == 1.0


def test_an_answer_of_one_token_has_no_time_per_output_token():
    one = answer(0.0, 1.0)

    assert one.tpot_s is None
    assert Latencies.of([one]).tpot_s.max == 0.0


def test_a_percentile_is_a_value_that_was_seen():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 99) == 4.0
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7.0], 0) == 7.0


def test_the_gaps_of_all_answers_are_spread_together():
    found = Latencies.of([answer(0.0, 1.0, 1.1), answer(0.0, 1.0, 1.2, 1.5)])

    assert found.itl_s.max == pytest.approx(0.3)
    assert found.itl_s.p50 == pytest.approx(0.2)


def test_what_failed_counts_against_goodput():
    timings = [answer(0.0, 1.0, 1.1), answer(0.0, 3.0, 3.1)]

    found = goodput(timings, lambda t: t.ttft_s <= 2.0, num_asked=4, seconds=10.0)

    assert found == Goodput(num_good=1, num_asked=4, per_s=0.1)
    assert found.share == 0.25


def test_rates_are_over_the_whole_span():
    timings = [answer(0.0, 1.0, 2.0), answer(3.0, 3.5, 4.0, 5.0)]

    assert span_s(timings) == 5.0
    assert tokens_per_s(timings) == 1.0
    assert tokens_per_s([]) == 0.0


class TestAlone:
    alone = Alone(((100, 0.2), (200, 0.4), (400, 1.0)), tpot_s=0.05)

    def test_lengths_between_measured_ones_are_on_a_line(self):
        assert self.alone.ttft_s(200) == 0.4
        assert self.alone.ttft_s(300) == pytest.approx(0.7)

    def test_longer_ones_go_on_as_the_last_two_did(self):
        assert self.alone.ttft_s(600) == pytest.approx(1.6)

    def test_shorter_ones_take_as_long_as_the_shortest_measured(self):
        assert self.alone.ttft_s(5) == 0.2

    def test_slowdowns_are_times_what_this_answer_would_have_taken(self):
        timing = answer(0.0, 0.8, 0.9, 1.0, num_prompt_tokens=200)

        found = self.alone.slowdowns(timing)

        assert found.ttft == pytest.approx(2.0)
        assert found.tpot == pytest.approx(2.0)
        assert found.e2e == pytest.approx(1.0 / 0.5)
