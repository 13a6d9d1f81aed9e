"""What the numbers mean, in sentences that are made of them: a rerun changes both together.

Pure: summaries and the crossover in, words out. Nothing here says more than the numbers do; a
difference of less than LEVEL is called none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.compare.crossover import Crossover, sentence
from bench.compare.plan import CrossoverPlan
from bench.compare.summary import (
    SARATHI_RELAXED,
    SARATHI_STRICT,
    WaySummary,
    WorkloadSummary,
)
from core.config import Mode

LEVEL = 0.05
POINTS = ("p50", "p95", "p99", "max")
NOISY_CORES = 0.1
LATE_S = 0.02


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that ways are compared in."""

    name: str
    read: Callable[[WaySummary], float]
    show: Callable[[float], str]
    more_is_better: bool = False

    def best(self, ways: list[WaySummary]) -> WaySummary:
        """Who has the best value."""
        return (max if self.more_is_better else min)(ways, key=self.read)

    def is_better(self, one: WaySummary, other: WaySummary) -> bool:
        """Whether `one` is better by more than LEVEL."""
        left, right = self.read(one), self.read(other)
        if self.more_is_better:
            return left > right * (1 + LEVEL)
        return left < right * (1 - LEVEL)


def seconds(value: float) -> str:
    """With as many digits as matter: 84 ms, 2.51 s."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{value:.1f} tokens/s"


def _spread(name: str, label: str) -> list[Measure]:
    """The measures of one latency."""

    def of(point: str) -> Callable[[WaySummary], float]:
        return lambda way: float(getattr(getattr(way.latencies, name), point))

    return [Measure(f"{label} {point}", of(point), seconds) for point in POINTS]


MEASURES = (
    *_spread("ttft_s", "TTFT"),
    *_spread("tpot_s", "TPOT"),
    *_spread("itl_s", "ITL"),
    *_spread("e2e_s", "e2e"),
    Measure("output", lambda way: way.tokens_per_s, _rate, more_is_better=True),
    Measure("answers within the SLO", lambda way: way.slo.share, _share, more_is_better=True),
)
# The others say much the same.
COMPARED = (
    *("TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99", "ITL max", "e2e p50"),
    *("output", "answers within the SLO"),
)
SHORT = {
    "soonest first token": "TTFT p50",
    "steadiest streams": "ITL p99",
    "most tokens": "output",
    "most good answers": "answers within the SLO",
}


def on_workload(summary: WorkloadSummary) -> Iterator[str]:
    """What one workload showed."""
    yield from _on_disaggregation(summary)
    yield _on_papers(summary)
    yield from _on_transfer(summary)
    yield _on_tokens(summary)
    yield from _on_failures(summary)


def _on_disaggregation(summary: WorkloadSummary) -> Iterator[str]:
    ways = answering(summary)
    own = next((way for way in ways if way.way is Mode.DISAGGREGATED), None)
    others = [way for way in ways if way is not own]
    if own is None or not others:
        return
    wins, losses = [], []
    for measure in MEASURES:
        if measure.name not in COMPARED:
            continue
        best = measure.best(others)
        words = (
            f"{measure.name} {measure.show(measure.read(own))} against "
            f"{measure.show(measure.read(best))} ({best.way})"
        )
        if measure.is_better(own, best):
            wins.append(words)
        elif measure.is_better(best, own):
            losses.append(words)
    yield f"**Where disaggregation loses** to the better of the others: {_listed(losses)}."
    yield f"**Where it wins**: {_listed(wins)}."


def answering(summary: WorkloadSummary) -> list[WaySummary]:
    """The ways that answered something: of the others there is no time to compare."""
    return [way for way in summary.ways if way.num_failed < way.num_asked]


def _on_papers(summary: WorkloadSummary) -> str:
    parts = []
    for way in summary.ways:
        words = f"`{way.way}` {way.num_limits_met} of 9"
        multiple = way.sarathi_multiple
        if multiple is not None:
            kept = "relaxed" if multiple <= SARATHI_RELAXED else "none"
            kept = "strict" if multiple <= SARATHI_STRICT else kept
            words += f" and {multiple:.1f} decode steps ({kept})"
        parts.append(words)
    return (
        f"**By the papers' SLOs** (Splitwise's nine limits met; Sarathi-Serve's p99 gap, strict "
        f"{SARATHI_STRICT}, relaxed {SARATHI_RELAXED}): {'; '.join(parts)}."
    )


def _on_transfer(summary: WorkloadSummary) -> Iterator[str]:
    for way in summary.ways:
        moved = way.transfer
        if moved is not None:
            yield (
                f"**The move** of KV caches in `{way.way}`: {moved.num_bytes / 1e6:.0f} MB for "
                f"{moved.num_moved} answers; {seconds(moved.exposed_s)} of each was not hidden "
                f"behind prefill, {moved.exposed_share:.1%} of the mean TTFT (it delays the second "
                "token, not the first)."
            )


def _on_tokens(summary: WorkloadSummary) -> str:
    check = summary.tokens
    if check.num_compared == 0:
        return "**Tokens**: there was nothing to compare."
    ties = ""
    if check.num_ties:
        ties = (
            f"; {check.num_ties} part where two tokens are nearly as likely (at most "
            f"{check.widest_tie:.3f} apart)"
        )
    if check.is_same:
        return (
            f"**Tokens** are the same in all ways: of {check.num_compared} pairs of answers "
            f"{check.num_equal} are equal to the end{ties}."
        )
    return (
        f"**Tokens differ** in {len(check.differences)} of {check.num_compared} pairs of answers"
        f"{ties}. The first: {check.differences[0]}."
    )


def _on_failures(summary: WorkloadSummary) -> Iterator[str]:
    for way in summary.ways:
        if way.num_failed:
            yield (
                f"**Failed** in `{way.way}`: {way.num_failed} of {way.num_asked} requests "
                f"({way.failures[0] if way.failures else 'no token came'}); they count against "
                "the SLOs and are in no latency."
            )
    if any(way.lateness_s.max > LATE_S for way in summary.ways):
        late = ", ".join(f"{seconds(w.lateness_s.max)} in `{w.way}`" for w in summary.ways)
        yield (
            f"**The client** sent requests late, at most {late}: times count from when they were "
            "due."
        )
    if any(way.other_cores > NOISY_CORES for way in summary.ways):
        taken = ", ".join(f"{w.other_cores:.2f} in `{w.way}`" for w in summary.ways)
        yield (
            f"**Noise**: other processes took up to so many cores in a round: {taken}. Times are "
            "longer for it, and small differences say nothing."
        )


def in_short(
    crossover: Crossover | None, plan: CrossoverPlan | None, summaries: Sequence[WorkloadSummary]
) -> Iterator[str]:
    """The report in a few sentences; that the machine was busy comes first."""
    most = max((way.other_cores for one in summaries for way in one.ways), default=0.0)
    if most > NOISY_CORES:
        yield (
            f"**The machine was busy**: other processes took up to {most:.2f} cores while this was "
            "measured; on a quiet one it may come out otherwise."
        )
    if crossover is not None and plan is not None:
        yield from _on_crossover(crossover)
        yield from _on_capacity(crossover, plan.streams)
    for summary in summaries:
        ways = answering(summary)
        if not ways:
            yield f"**{summary.name}**: no request was answered."
            continue
        measures = {measure.name: measure for measure in MEASURES}
        found = (_leading(words, measures[name], ways) for words, name in SHORT.items())
        yield f"**{summary.name}**: {'; '.join(found)}."


def _leading(words: str, measure: Measure, ways: list[WaySummary]) -> str:
    best = measure.best(ways)
    level = [way for way in ways if not measure.is_better(best, way)]
    names = " and ".join(f"`{way.way}`" for way in level)
    if len(level) == len(ways) > 1:
        names = "all alike"
    return f"{words}: {names} ({measure.name} {measure.show(measure.read(best))})"


def _on_crossover(crossover: Crossover) -> Iterator[str]:
    yield f"**{sentence(crossover)}**"
    targets_s = crossover.targets_s() if Mode.DISAGGREGATED in crossover.points else None
    if targets_s is not None:
        low_s, high_s = targets_s
        below = f"to {seconds(high_s)}" if high_s < float("inf") else "on"
        yield (
            f"At {crossover.lengths[-1]} tokens it is the choice for any target from "
            f"{seconds(low_s)} {below}."
        )


def _on_capacity(crossover: Crossover, num_streams: int) -> Iterator[str]:
    rates = {way: num_streams / crossover.quiet_itl_s(way) for way in crossover.points}
    words = ", ".join(f"{rate:.0f} tokens/s in `{way}`" for way, rate in rates.items())
    yield f"While nobody sends a prompt, {num_streams} running streams get {words}."
    own = rates.pop(Mode.DISAGGREGATED, None)
    if own is None or not rates:
        return
    best = max(rates, key=rates.__getitem__)
    if own < rates[best] * (1 - LEVEL):
        yield (
            f"**Disaggregation loses {1 - own / rates[best]:.0%} of the capacity for tokens** to "
            f"`{best}` then: the workers that read prompts make none."
        )
    else:
        yield f"Disaggregation loses no capacity for tokens to `{best}` that could be measured."


def _listed(items: list[str]) -> str:
    return "; ".join(items) if items else "nowhere (a difference of less than 5 % is none)"
