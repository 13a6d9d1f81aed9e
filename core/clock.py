"""Where the time comes from: decisions take `now_s`, only the edges read a clock.

Times are monotonic seconds. The manual clock is an official double: the simulator and the tests
of schedulers, leases and the transfer's state machine move it by hand.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds as last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, which may not be negative."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
