"""TTFT, TPOT, ITL, end-to-end times and goodput of answers, from when their tokens came.

Definitions, for an answer that was due at `due_s` (its place in the schedule, so that a client
that is late cannot hide a server that is: no coordinated omission):

    TTFT   first token - due
    TPOT   (last token - first token) / (output tokens - 1); none for an answer of one token
    ITL    each gap between two tokens
    e2e    last token - due

Percentiles are by nearest rank: a value that was really seen. Pure: times in, numbers out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer that ended well, in seconds of one clock; gaps_s has one entry a later token."""

    due_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    gaps_s: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None when there is no such token."""
        if self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """The whole time."""
        return self.last_token_s - self.due_s

    @property
    def own_itl_p99_s(self) -> float:
        """The 99th percentile of this answer's own gaps; 0 without one."""
        return percentile(self.gaps_s, 99) if self.gaps_s else 0.0


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that at least `percent` of 100 values do not exceed; needs a value."""
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread; of no values all is zero."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of these values."""
        found = list(values)
        if not found:
            return cls()
        p50, p90, p95, p99, most = (percentile(found, p) for p in (50, 90, 95, 99, 100))
        return cls(sum(found) / len(found), p50, p90, p95, p99, most)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Every answer's times; ITL is over the gaps of all answers together."""

    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> "Latencies":
        """The spreads of these answers."""
        return cls(
            Spread.of(timing.ttft_s for timing in timings),
            Spread.of(t.tpot_s for t in timings if t.tpot_s is not None),
            Spread.of(gap_s for timing in timings for gap_s in timing.gaps_s),
            Spread.of(timing.e2e_s for timing in timings),
        )


def span_s(timings: Sequence[Timing]) -> float:
    """From the first answer due to the last token; 0 without answers."""
    if not timings:
        return 0.0
    return max(t.last_token_s for t in timings) - min(t.due_s for t in timings)


def tokens_per_s(timings: Sequence[Timing]) -> float:
    """Output tokens a second over the whole span; 0 without answers."""
    seconds = span_s(timings)
    return sum(t.num_output_tokens for t in timings) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many of the requests that were asked were answered within an SLO, and how many a second.

    DistServe (OSDI'24) calls goodput the highest rate at which enough requests meet their SLO; this
    is what met it at the one rate that was played.
    """

    num_good: int
    num_asked: int
    per_s: float

    @property
    def share(self) -> float:
        """Good ones among those asked."""
        return self.num_good / self.num_asked if self.num_asked else 0.0


def goodput(
    timings: Sequence[Timing],
    is_good: Callable[[Timing], bool],
    *,
    num_asked: int,
    seconds: float,
) -> Goodput:
    """Count the good ones; a request that failed is among num_asked and has no timing."""
    num_good = sum(map(is_good, timings))
    return Goodput(num_good, num_asked, num_good / seconds if seconds > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Alone:
    """What a request takes when nothing else runs: (prompt tokens, TTFT) rising, and TPOT."""

    ttfts_s: tuple[tuple[int, float], ...]
    tpot_s: float

    def ttft_s(self, num_prompt_tokens: int) -> float:
        """TTFT of a prompt of this length: on the line between the two nearest measured ones."""
        points = ((0, 0.0), *self.ttfts_s)
        pairs = list(pairwise(points))
        (left, low_s), (right, high_s) = next(
            (pair for pair in pairs if num_prompt_tokens <= pair[1][0]), pairs[-1]
        )
        if left == 0:  # short prompts have a floor that a line through zero would miss
            return high_s
        return low_s + (high_s - low_s) * (num_prompt_tokens - left) / (right - left)

    def slowdowns(self, timing: Timing) -> "Slowdowns":
        """How many times as long an answer took as it would have alone."""
        ttft_s = self.ttft_s(timing.num_prompt_tokens)
        e2e_s = ttft_s + (timing.num_output_tokens - 1) * self.tpot_s
        tpot = timing.tpot_s / self.tpot_s if timing.tpot_s is not None else None
        return Slowdowns(timing.ttft_s / ttft_s, tpot, timing.e2e_s / e2e_s)


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Times the uncontended request's; tpot is None for an answer of one token."""

    ttft: float
    tpot: float | None
    e2e: float
