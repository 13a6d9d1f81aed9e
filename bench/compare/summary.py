"""The numbers of one workload in each way: what the report shows and the verdict argues with.

All rounds of a way are taken together. SLOs, beside the plan's own:

    Splitwise (Patel et al., ISCA'24, table VI): nine limits on how many times longer than alone;
        TTFT, time between tokens and e2e, each at P50, P90 and P99; all nine have to be met. An
        answer is good by it when it keeps the limits of P99.
    Sarathi-Serve (Agrawal et al., OSDI'24, s.5.1): the 99th percentile of all gaps is at most 5
        (strict) or 25 (relaxed) decode steps that no prefill disturbs. There a step has 32
        sequences of 4k tokens; here the streams of the probe (`crossover`).

Pure: a `Comparison` in, numbers out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.client import Answer
from bench.compare.metrics import (
    Goodput,
    Latencies,
    Slowdowns,
    Spread,
    Timing,
    goodput,
    span_s,
)
from bench.compare.plan import SloPlan
from bench.compare.run import Comparison
from bench.compare.tokens import NEAR_TIE, TokenCheck, check_tokens
from core.completion import Completion
from core.config import Mode

# By measure: how many times longer than alone at P50, P90, P99.
SPLITWISE = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
SARATHI_STRICT, SARATHI_RELAXED = 5, 25


@dataclass(frozen=True, slots=True)
class Limit:
    """One of Splitwise's nine: what was found, and what it may be."""

    measure: str
    percent: int
    found: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it is kept."""
        return self.found <= self.limit


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moving KV caches between workers: bytes, and the part of TTFT that nothing hid.

    Means over the answers whose KV cache was moved.
    """

    num_moved: int
    num_bytes: int
    push_s: float
    exposed_s: float
    exposed_share: float


@dataclass(frozen=True, slots=True)
class WaySummary:
    """One way's numbers for one workload.

    failures has one example of each kind of error.
    phase_shares: of the mean answer's whole time, by phase; what no phase covers is "unaccounted".
    other_cores: what other processes and guests took, the worst round.
    """

    way: Mode
    num_asked: int
    num_failed: int
    failures: tuple[str, ...]
    latencies: Latencies
    tokens_per_s: float
    prompt_tokens_per_s: float
    slo: Goodput
    splitwise_good: Goodput
    splitwise: tuple[Limit, ...]
    decode_step_s: float | None
    transfer: Transfer | None
    phase_shares: dict[str, float]
    lateness_s: Spread
    other_cores: float

    @property
    def num_limits_met(self) -> int:
        """Of Splitwise's nine."""
        return sum(limit.is_met for limit in self.splitwise)

    @property
    def sarathi_multiple(self) -> float | None:
        """The 99th percentile of all gaps in undisturbed decode steps; None without a probe."""
        return self.latencies.itl_s.p99 / self.decode_step_s if self.decode_step_s else None


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """One workload: each way's numbers, and whether they gave the same tokens."""

    name: str
    ways: tuple[WaySummary, ...]
    tokens: TokenCheck

    def of(self, way: Mode) -> WaySummary | None:
        """The numbers of one way; None if it was not played."""
        return next((one for one in self.ways if one.way is way), None)


def summaries(comparison: Comparison) -> list[WorkloadSummary]:
    """One for each workload, in the plan's order."""
    return [_workload(comparison, workload.name) for workload in comparison.plan.workloads]


def _workload(comparison: Comparison, name: str) -> WorkloadSummary:
    plan = comparison.plan
    rounds = [
        {way: comparison.played(name, way)[number].answers for way in plan.ways}
        for number in range(plan.rounds)
    ]
    check = check_tokens(rounds, near_tie=NEAR_TIE[plan.engine.dtype])
    ways = tuple(_way(comparison, name, way) for way in plan.ways)
    return WorkloadSummary(name, ways, check)


def _way(comparison: Comparison, name: str, way: Mode) -> WaySummary:
    played = comparison.played(name, way)
    answers = [answer for one in played for answer in one.answers]
    timings = [timing for answer in answers if (timing := answer.timing()) is not None]
    errors = {type(a.error): str(a.error) for a in answers if a.error is not None}
    # Rounds are apart: the time between them belongs to no way.
    seconds = sum(span_s(_timings(one.answers)) for one in played)
    alone, crossover = comparison.alone, comparison.crossover
    assert alone is not None
    slowdowns = [alone.slowdowns(timing) for timing in timings]
    return WaySummary(
        way=way,
        num_asked=len(answers),
        num_failed=len(answers) - len(timings),
        failures=tuple(errors.values()),
        latencies=Latencies.of(timings),
        tokens_per_s=_rate(sum(t.num_output_tokens for t in timings), seconds),
        prompt_tokens_per_s=_rate(sum(t.num_prompt_tokens for t in timings), seconds),
        slo=_good(timings, len(answers), seconds, comparison.plan.slo),
        splitwise_good=goodput(
            timings,
            lambda timing: _keeps_p99(alone.slowdowns(timing)),
            num_asked=len(answers),
            seconds=seconds,
        ),
        splitwise=_limits(slowdowns),
        decode_step_s=crossover.decode_step_s if crossover is not None else None,
        transfer=_transfer(answers),
        phase_shares=_phase_shares(answers),
        lateness_s=Spread.of(answer.lateness_s for answer in answers),
        other_cores=max(one.cpu.other_cores + one.cpu.stolen_cores for one in played),
    )


def _timings(answers: Sequence[Answer]) -> list[Timing]:
    return [timing for answer in answers if (timing := answer.timing()) is not None]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _good(timings: Sequence[Timing], num_asked: int, seconds: float, slo: SloPlan) -> Goodput:
    def is_good(timing: Timing) -> bool:
        return (
            timing.ttft_s <= slo.ttft_s
            and (timing.tpot_s or 0.0) <= slo.tpot_s
            and timing.own_itl_p99_s <= slo.itl_s
        )

    return goodput(timings, is_good, num_asked=num_asked, seconds=seconds)


def _keeps_p99(slowdowns: Slowdowns) -> bool:
    return (
        slowdowns.ttft <= SPLITWISE["ttft"][2]
        and (slowdowns.tpot or 0.0) <= SPLITWISE["tpot"][2]
        and slowdowns.e2e <= SPLITWISE["e2e"][2]
    )


def _limits(slowdowns: Sequence[Slowdowns]) -> tuple[Limit, ...]:
    by_measure = {
        "ttft": [one.ttft for one in slowdowns],
        "tpot": [one.tpot for one in slowdowns if one.tpot is not None],
        "e2e": [one.e2e for one in slowdowns],
    }
    found = []
    for measure, limits in SPLITWISE.items():
        spread = Spread.of(by_measure[measure])
        for percent, limit in zip((50, 90, 99), limits, strict=True):
            found.append(Limit(measure, percent, getattr(spread, f"p{percent}"), limit))
    return tuple(found)


def _completions(answers: Sequence[Answer]) -> list[Completion]:
    return [answer.completion for answer in answers if answer.completion is not None]


def _transfer(answers: Sequence[Answer]) -> Transfer | None:
    moved = [one for one in _completions(answers) if one.transfer is not None]
    reports = [one.transfer for one in moved if one.transfer is not None]
    if not reports:
        return None
    num = len(reports)
    exposed_s = sum(report.exposed_s for report in reports) / num
    ttft_s = sum(one.phases.time_to_first_token_s for one in moved) / num
    return Transfer(
        num_moved=num,
        num_bytes=sum(report.num_bytes for report in reports),
        push_s=sum(report.push_s for report in reports) / num,
        exposed_s=exposed_s,
        exposed_share=exposed_s / ttft_s if ttft_s > 0 else 0.0,
    )


def _phase_shares(answers: Sequence[Answer]) -> dict[str, float]:
    phases = [one.phases for one in _completions(answers)]
    total_s = sum(one.total_s for one in phases)
    if total_s <= 0:
        return {}
    names = [name for name, _ in phases[0].items()]
    sums = {name: sum(dict(one.items())[name] for one in phases) for name in names}
    sums["unaccounted"] = max(total_s - sum(sums.values()), 0.0)
    return {name: seconds / total_s for name, seconds in sums.items()}
