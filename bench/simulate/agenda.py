"""What happens next, on a manual clock."""

import heapq
from collections.abc import Callable

from core.clock import ManualClock

Act = Callable[[], None]


class Agenda:
    """Acts in the order of their times, and of their making where the times are equal."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._acts: list[tuple[float, int, Act]] = []
        self._num_made = 0

    @property
    def now_s(self) -> float:
        """The clock's time."""
        return self.clock.now_s()

    def at(self, when_s: float, act: Act) -> None:
        """Call `act` at `when_s`, or now if that is over."""
        self._num_made += 1
        heapq.heappush(self._acts, (max(when_s, self.now_s), self._num_made, act))

    def run(self, is_done: Callable[[], bool]) -> None:
        """Let time pass until `is_done`, or nothing is left to happen."""
        while self._acts and not is_done():
            when_s, _, act = heapq.heappop(self._acts)
            self.clock.advance(when_s - self.now_s)
            act()
