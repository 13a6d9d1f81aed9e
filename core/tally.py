"""What a worker counts of its own work since it began, in plain arrays, for the router to tell.

A worker speaks no HTTP: its counts go with its status to each router, as they stand. They begin
with the worker's process and only grow, so a router that hears of another incarnation hears of
counts that began at zero, and one that was away for a while has missed nothing.

In a loop of steps a count costs an addition, an observation a binary search more: whoever counts
there keeps the `Total` or `Distribution` that it was given.
"""

from bisect import bisect_left
from collections.abc import Iterator

from core.request import WorkerName
from core.telemetry import Entry, Kind, Sample


class Total:
    """One counter, or one gauge that is set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Distribution:
    """One histogram.

    Invariant: as many observations as the counts add up to, and `sum` is theirs.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more value; none is negative, as a sum that falls would be read as a restart."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Tally:
    """Counts of a worker, by metric and labels; the first label, the worker itself, is left out.

    Contract: label values come from bounded sets, as nothing is ever forgotten.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[Entry, tuple[str, ...]], Total] = {}
        self._distributions: dict[tuple[Entry, tuple[str, ...]], Distribution] = {}

    def total(self, entry: Entry, *labels: str) -> Total:
        """The counter or gauge of these labels; told from now on."""
        assert entry.kind is not Kind.HISTOGRAM
        return self._totals.setdefault((entry, labels), Total())

    def distribution(self, entry: Entry, *labels: str) -> Distribution:
        """The histogram of these labels; told from now on."""
        assert entry.kind is Kind.HISTOGRAM
        return self._distributions.setdefault((entry, labels), Distribution(entry.buckets))

    def samples(self, worker: WorkerName) -> Iterator[Sample]:
        """Everything, as it stands, as that worker's."""
        for (entry, labels), total in self._totals.items():
            yield Sample(entry, total.value, (worker, *labels))
        for (entry, labels), one in self._distributions.items():
            yield Sample(entry, one.sum, (worker, *labels), tuple(one.counts))
