"""How far another process's monotonic clock is ahead of ours.

As NTP does (RFC 5905, s.8 and 10): whoever is asked stamps its answer, which was made somewhere
between question and arrival; the sample with the shortest round trip of the last ones counts.
Monotonic clocks of two hosts are far apart, those of one host are the same clock: an offset that
may be zero is zero.

Pure: times in, an estimate out.
"""

from collections import deque
from dataclasses import dataclass, replace

from core.events.event import Event
from core.request import WorkerName

# One sample comes each second; over so many of them two clocks drift by less than a millisecond.
NUM_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """A worker's clock is offset_s ahead of the router's, give or take uncertainty_s."""

    worker: WorkerName
    offset_s: float = 0.0
    uncertainty_s: float = 0.0

    def moved(self, event: Event) -> Event:
        """What the worker stamped, on the router's clock."""
        return replace(
            event,
            begin_s=event.begin_s - self.offset_s,
            end_s=event.end_s - self.offset_s,
            where=self.worker,
            uncertainty_s=self.uncertainty_s,
        )


class ClockOffset:
    """The estimate, from the last samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)

    def sample(self, asked_s: float, told_s: float, arrived_s: float) -> None:
        """A question of `asked_s` was answered at `told_s` of the other clock, 0 if it has none."""
        if told_s == 0.0:
            return  # another version
        uncertainty_s = (arrived_s - asked_s) / 2
        self._samples.append((uncertainty_s, told_s - (asked_s + arrived_s) / 2))

    def of(self, worker: WorkerName) -> WorkerClock:
        """The clock as it is known now; taken for ours before the first sample."""
        uncertainty_s, offset_s = min(self._samples, default=(0.0, 0.0))
        if abs(offset_s) <= uncertainty_s:
            return WorkerClock(worker, 0.0, uncertainty_s + abs(offset_s))
        return WorkerClock(worker, offset_s, uncertainty_s)
