"""Waits between attempts that double up to a limit.

Pure: says how long to wait, and waits for nobody.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """`first_s`, then each wait twice as long as the one before, at most `most_s`."""

    first_s: float
    most_s: float
    _last_s: float | None = None

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        wait_s = self.first_s if self._last_s is None else 2 * self._last_s
        self._last_s = min(wait_s, self.most_s)
        return self._last_s

    def reset(self) -> None:
        """An attempt succeeded: the next wait is the first one again."""
        self._last_s = None
