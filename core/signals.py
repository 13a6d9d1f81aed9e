"""What a worker measures of its own work for those who scale pools, and how it is averaged.

Each value is of the last WINDOW_S seconds and is measured where it happens. None means that nothing
was measured, which is not zero.

Pure: times and values in, values out.
"""

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 30.0
# Of very many waits within the window the newest say enough.
MAX_VALUES = 1024


@dataclass(frozen=True, slots=True)
class Signals:
    """What one worker measured lately.

    queue_wait_*: at prefill from a prompt's arrival to its first step, at decode from a request's
    arrival to the grant of its blocks, and again from the seal to its first step. oldest_wait_s is
    that of the one that waits longest now, at decode for blocks.
    num_parked: prompts that are read and whose KV cache is not sealed: that wait is the link's, or
    decode's, and not prefill's. tokens_per_s: prompt tokens for each second of computing, when
    the worker last read.
    num_in_flight_bytes are computed and not acknowledged; bytes_per_s is what all links carried,
    max_bytes_per_s what they carry while they are busy; transfer_wait_s the mean of what a handoff
    took after its prompt was read. step_s is the mean time of a decode step.
    """

    queue_wait_p50_s: float | None = None
    queue_wait_p95_s: float | None = None
    oldest_wait_s: float = 0.0
    num_parked: int = 0
    tokens_per_s: float | None = None
    num_in_flight_bytes: int = 0
    bytes_per_s: float | None = None
    max_bytes_per_s: float | None = None
    transfer_wait_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean of a quantity, and its squared coefficient of variation: variance / mean^2."""

    mean: float
    scv: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What a router is asked for, measured over its window.

    arrival_scv is that of the times between arrivals, 1 where they are random. num_prompt_tokens
    leaves out what is cached; decode_s is how long an answer holds its slot. Requests in line have
    no workers yet. idle_s: how long nobody has asked, or waited for, anything.
    """

    requests_per_s: float = 0.0
    arrival_scv: float = 1.0
    num_prompt_tokens: Moments | None = None
    decode_s: Moments | None = None
    num_in_line: int = 0
    num_line_tokens: int = 0
    oldest_in_line_s: float = 0.0
    idle_s: float = 0.0


class Window:
    """Values of the last `span_s` seconds, the newest MAX_VALUES of them."""

    def __init__(self, span_s: float = WINDOW_S) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def note(self, value: float, now_s: float) -> None:
        """One more value."""
        self._values.append((now_s, value))

    def quantile(self, share: float, now_s: float) -> float | None:
        """The smallest value that at least `share` of the values do not exceed."""
        values = sorted(self._lately(now_s))
        if not values:
            return None
        return values[max(math.ceil(share * len(values)) - 1, 0)]

    def mean(self, now_s: float) -> float | None:
        """Their mean."""
        values = self._lately(now_s)
        return sum(values) / len(values) if values else None

    def moments(self, now_s: float) -> Moments | None:
        """Mean and spread; None without values, or where all are zero."""
        values = self._lately(now_s)
        mean = sum(values) / len(values) if values else 0.0
        if mean == 0:
            return None
        return Moments(mean, sum((value - mean) ** 2 for value in values) / len(values) / mean**2)

    def num_values(self, now_s: float) -> int:
        """How many there are."""
        self._forget(now_s)
        return len(self._values)

    def per_s(self, now_s: float) -> float | None:
        """Their sum for each second of the span that they cover; None when there are none."""
        values = self._lately(now_s)
        return sum(values) / self.covered_s(now_s) if values else None

    def is_empty(self, now_s: float) -> bool:
        """Whether nothing was noted within the span."""
        self._forget(now_s)
        return not self._values

    def covered_s(self, now_s: float) -> float:
        """The span that the values cover: shorter where there were too many to keep."""
        is_cut = len(self._values) == MAX_VALUES
        return max(now_s - self._values[0][0], 1e-9) if is_cut else self._span_s

    def _lately(self, now_s: float) -> list[float]:
        self._forget(now_s)
        return [value for _, value in self._values]

    def _forget(self, now_s: float) -> None:
        while self._values and self._values[0][0] < now_s - self._span_s:
            self._values.popleft()
