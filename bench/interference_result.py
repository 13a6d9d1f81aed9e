"""What was seen of one long prompt among running streams, and the numbers made of it.

    quiet          from when all streams run until the long prompt is sent
    during prefill from then until the long prompt's second token: it was read, moved, and runs.
                   A gap counts if a part of it lies in there
    whole run      every gap of the streams

The longest gap is what a user feels; percentiles of a whole run hide it. Pure: logs in, numbers and
rows out.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from bench.load import Gap, StreamLog
from bench.machine import CpuUse
from bench.report import Row

# Streams that have this many tokens no longer feel the prefill of their neighbours.
SETTLED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Observation:
    """One round of one setup."""

    streams: tuple[StreamLog, ...]
    long_prompt: StreamLog
    cpu: CpuUse

    @property
    def quiet(self) -> tuple[float, float]:
        """When all streams had settled, and when the long prompt was sent."""
        settled_s = max(log.arrival_of(SETTLED_TOKENS - 1) for log in self.streams)
        return settled_s, self.long_prompt.sent_s

    @property
    def disturbed(self) -> tuple[float, float]:
        """When the long prompt was sent, and when its second token came."""
        return self.long_prompt.sent_s, self.long_prompt.arrival_of(1)

    @property
    def is_covered(self) -> bool:
        """Whether every stream ran until the long prompt did, too."""
        return min(log.arrivals[-1].at_s for log in self.streams) >= self.disturbed[1]

    def gaps(self) -> list[Gap]:
        """All gaps of all streams."""
        return [gap for log in self.streams for gap in log.gaps()]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One round, or the medians of some. ITL in ms; rates count the streams' tokens alone."""

    quiet_p50_ms: float
    quiet_p99_ms: float
    prefill_p99_ms: float
    prefill_max_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    ttft_s: float
    queue_s: float
    prefill_s: float
    exposed_transfer_s: float
    quiet_tokens_per_s: float
    prefill_tokens_per_s: float
    tokens_per_s: float
    other_cores: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the report: a field of Numbers, and how many quiet p50 it may be when split."""

    name: str
    unit: str
    field: str
    num_digits: int
    limit: int | None = None


MEASURES = (
    Measure("quiet ITL p50", "ms", "quiet_p50_ms", 1),
    Measure("quiet ITL p99", "ms", "quiet_p99_ms", 1),
    Measure("ITL p99 during prefill", "ms", "prefill_p99_ms", 1, limit=3),
    Measure("longest gap during prefill", "ms", "prefill_max_ms", 1, limit=6),
    Measure("ITL p50, whole run", "ms", "p50_ms", 1),
    Measure("ITL p99, whole run", "ms", "p99_ms", 1),
    Measure("ITL max, whole run", "ms", "max_ms", 1),
    Measure("TTFT of the long prompt", "s", "ttft_s", 2),
    Measure("its queue", "s", "queue_s", 2),
    Measure("its prefill", "s", "prefill_s", 2),
    Measure("its exposed transfer", "s", "exposed_transfer_s", 3),
    Measure("quiet streams", "tokens/s", "quiet_tokens_per_s", 0),
    Measure("streams during prefill", "tokens/s", "prefill_tokens_per_s", 0),
    Measure("streams, whole run", "tokens/s", "tokens_per_s", 0),
    Measure("taken by other work", "cores", "other_cores", 2),
)


def numbers_of(seen: Observation) -> Numbers:
    """The numbers of one round."""
    gaps = seen.gaps()
    quiet = [gap for gap in gaps if _is_within(gap, seen.quiet)]
    disturbed = [gap for gap in gaps if gap.overlaps(*seen.disturbed)]
    whole = (
        min(log.sent_s for log in seen.streams),
        max(log.arrivals[-1].at_s for log in seen.streams),
    )
    completion = seen.long_prompt.completion
    assert completion is not None
    return Numbers(
        quiet_p50_ms=_percentile_ms(quiet, 50),
        quiet_p99_ms=_percentile_ms(quiet, 99),
        prefill_p99_ms=_percentile_ms(disturbed, 99),
        prefill_max_ms=_percentile_ms(disturbed, 100),
        p50_ms=_percentile_ms(gaps, 50),
        p99_ms=_percentile_ms(gaps, 99),
        max_ms=_percentile_ms(gaps, 100),
        ttft_s=seen.long_prompt.ttft_s,
        queue_s=completion.phases.queue_s,
        prefill_s=completion.phases.prefill_s,
        exposed_transfer_s=completion.phases.exposed_transfer_s,
        quiet_tokens_per_s=_rate(seen.streams, seen.quiet),
        prefill_tokens_per_s=_rate(seen.streams, seen.disturbed),
        tokens_per_s=_rate(seen.streams, whole),
        other_cores=seen.cpu.other_cores + seen.cpu.stolen_cores,
    )


def median_of(rounds: Sequence[Numbers]) -> Numbers:
    """Each number's median over the rounds."""
    return Numbers(
        **{f.name: statistics.median(getattr(r, f.name) for r in rounds) for f in fields(Numbers)}
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """The same scenario, same model and dtype, on another engine; fields as in Numbers."""

    name: str
    quiet_p50_ms: float
    p99_ms: float
    max_ms: float
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """All rounds of one setup."""

    name: str
    rounds: tuple[Numbers, ...]
    peer: Peer | None
    has_limits: bool

    def rows(self) -> list[Row]:
        """The report's rows: medians, beside the limit or the peer."""
        found = median_of(self.rounds)
        rows = [self._row(measure, found) for measure in MEASURES]
        worst_ms = max(numbers.prefill_max_ms for numbers in self.rounds)
        return [*rows, Row(f"{self.name}: longest gap of all rounds", worst_ms, "ms")]

    def _row(self, measure: Measure, found: Numbers) -> Row:
        name, value = f"{self.name}: {measure.name}", getattr(found, measure.field)
        if self.has_limits and measure.limit is not None:
            limit = f"limit: {measure.limit} x quiet p50"
            return Row(name, value, measure.unit, limit, measure.limit * found.quiet_p50_ms)
        peer_value = getattr(self.peer, measure.field, None)
        if self.peer is None or peer_value is None:
            return Row(name, value, measure.unit)
        return Row(name, value, measure.unit, self.peer.name, peer_value)


def _is_within(gap: Gap, span: tuple[float, float]) -> bool:
    return span[0] <= gap.started_s and gap.ended_s <= span[1]


def _percentile_ms(gaps: Sequence[Gap], percent: float) -> float:
    """Nearest rank: a gap that was really seen."""
    seconds = [gap.seconds for gap in gaps]
    return float(np.percentile(seconds, percent, method="inverted_cdf")) * 1e3


def _rate(streams: Sequence[StreamLog], span: tuple[float, float]) -> float:
    num_tokens = sum(log.num_tokens_between(*span) for log in streams)
    return num_tokens / (span[1] - span[0])
