"""What a run was worth: waits, goodput, worker-hours, and how often the pools turned round."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulate.cluster import Run
from bench.simulate.trip import Trip
from deploy.autoscaler.fit import Pair

MAX_SLOWDOWN = 2.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer takes at most: until its first token, and as its mean gap after it.

    To ttft_s comes MAX_SLOWDOWN times what reading the prompt takes alone: one bound for all
    lengths would ask nothing of short prompts, or the impossible of long ones (targets as
    slowdowns: Splitwise, ISCA'24).
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.15

    def is_met(self, trip: Trip) -> bool:
        """Whether the answer was good."""
        if trip.failure or trip.ttft_s is None:
            return False
        most_s = self.ttft_s + MAX_SLOWDOWN * trip.alone_s
        return trip.ttft_s <= most_s and (trip.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run; quantiles are (p50, p95), attainment is the share of good answers.

    num_resumed: requests that ended well after a worker failed them.
    """

    num_requests: int
    num_failed: int
    failures: dict[str, int]
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    line_s: tuple[float, float]
    attainment: float
    goodput_per_s: float
    worker_hours: float
    num_turns: int
    peak: Pair
    num_lost_workers: int = 0
    num_resumed: int = 0

    @classmethod
    def of(cls, run: Run, slo: Slo) -> "Outcome":
        """Of a run."""
        ended = [trip for trip in run.trips if not trip.failure]
        good = [trip for trip in ended if slo.is_met(trip)]
        sizes = [pair for _, pair in run.sizes]
        return cls(
            num_requests=len(run.trips),
            num_failed=len(run.trips) - len(ended),
            failures=dict(Counter(trip.failure for trip in run.trips if trip.failure)),
            ttft_s=quantiles([trip.ttft_s for trip in ended]),
            tpot_s=quantiles([trip.tpot_s for trip in ended]),
            line_s=quantiles([t.line_s for t in ended]),
            attainment=len(good) / len(run.trips),
            goodput_per_s=len(good) / run.ended_s if run.ended_s else 0.0,
            worker_hours=run.worker_s / 3600,
            num_turns=num_turns([p.prefill for p in sizes]) + num_turns([p.decode for p in sizes]),
            peak=Pair(max(p.prefill for p in sizes), max(p.decode for p in sizes)),
            num_lost_workers=len(run.losses),
            num_resumed=sum(trip.num_attempts > 1 for trip in ended),
        )


def num_turns(sizes: Sequence[int]) -> int:
    """How often a pool that had grown shrank, or the other way."""
    steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    steps = [step for step in steps if step]
    return sum((a > 0) != (b > 0) for a, b in zip(steps, steps[1:], strict=False))


def quantiles(values: Sequence[float | None]) -> tuple[float, float]:
    """(p50, p95) of the values that are known; not numbers where none is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return (math.nan, math.nan)
    return known[len(known) // 2], known[min(int(0.95 * len(known)), len(known) - 1)]
