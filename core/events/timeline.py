"""All that is known of where one request's time went: its phases, its events, and the clocks."""

from dataclasses import dataclass

from core.completion import Completion
from core.events.clock_offset import WorkerClock
from core.events.event import Event


@dataclass(frozen=True, slots=True)
class Timeline:
    """One answer, ended or still made; events in order of their begin, on the router's clock.

    The phases in `completion` are the truth; events show them in detail. now_s and now_wall_s are
    one moment on the router's monotonic clock and in seconds since 1970: what both together are
    good for is the wall time of an event. clocks are those of the workers that are connected.
    """

    completion: Completion
    events: tuple[Event, ...]
    is_running: bool
    now_s: float
    now_wall_s: float
    clocks: tuple[WorkerClock, ...] = ()

    def wall_s(self, at_s: float) -> float:
        """A time of the router's clock in seconds since 1970."""
        return at_s + self.now_wall_s - self.now_s
