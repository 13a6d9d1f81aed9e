"""Whether a worker is given requests after it failed some.

    closed     it is given requests; MAX_FAILURES in a row, less than WINDOW_S apart, open it
    open       it is given none until a back-off has passed
    half-open  it is given one: a success closes it, a failure opens it for twice as long

Pure: what happened and when in, a decision out.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.backoff import Backoff

MAX_FAILURES = 3
WINDOW_S = 30.0
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class Breaker:
    """The circuit breaker of one worker; a worker that comes back gets a new one."""

    _num_failures: int = 0
    _last_failure_s: float = -math.inf
    _open_until_s: float | None = None
    _num_trials: int = 0
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S))

    def allows(self, now_s: float) -> bool:
        """Whether the worker may be given a request now."""
        if self._open_until_s is None:
            return True
        return now_s >= self._open_until_s and self._num_trials == 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A request is at the worker; while it is open, that keeps others away from it."""
        is_trial = self._open_until_s is not None
        self._num_trials += is_trial
        try:
            yield
        finally:
            self._num_trials -= is_trial

    def succeeded(self) -> None:
        """The worker did what a request asked of it."""
        self._num_failures = 0
        self._open_until_s = None
        self._backoff.reset()

    def failed(self, now_s: float, *, is_unreachable: bool = False) -> None:
        """A request failed by the worker's fault; one that cannot be reached is opened at once."""
        if now_s - self._last_failure_s > WINDOW_S:
            self._num_failures = 0
        self._num_failures += 1
        self._last_failure_s = now_s
        is_half_open = self._open_until_s is not None and now_s >= self._open_until_s
        is_enough = self._num_failures >= MAX_FAILURES or is_unreachable
        if is_half_open or (is_enough and self._open_until_s is None):
            self._open_until_s = now_s + self._backoff.next_s()
