"""One server in a Ray actor, as whoever started or adopted it sees it.

Actors have `max_restarts=0`: a restarted actor would have lost its KV cache and would come back
under the old name as if nothing had happened. Whoever starts a lost one again (`deploy.supervisor`)
gets a new actor.
"""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from core.errors import PeerLost, TwophaseError

START_TIMEOUT_S = 600.0
# has_ended() and start() may block, also for one who lost interest; stop() gets through meanwhile.
MAX_CONCURRENCY = 16
# A call that waits for a server's end comes back after this, so that none outlives its caller.
LOOK_S = 30.0


class Actor:
    """A `Replica` (deploy.supervisor) whose server runs in the actor of `handle`.

    `free` gives back what was set aside for it; `why_late` tells what it lacks to start, if
    anything.
    """

    def __init__(
        self,
        name: str,
        handle: Any,  # Any: Ray makes an actor's methods, and what they return, at run time
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        free: Callable[[], None] = lambda: None,
        why_late: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Have it start its server, if it has not."""
        self._name = name
        self._actor = handle
        self._start_timeout_s = start_timeout_s
        self._free = free
        self._why_late = why_late
        self._starting = handle.start.remote()

    def wait_until_up(self) -> str:
        """host:port of its server.

        Raises:
            ModelError, ConfigError: it cannot start, as it says itself.
            PeerLost: it died, or did not come up in time.
        """
        return str(self._result(self._starting, self._start_timeout_s))

    def wait(self) -> str:
        """Block until its server has ended, or the actor died; why."""
        try:
            while not self._result(self._actor.has_ended.remote(LOOK_S), None):
                pass
        except TwophaseError as error:
            return str(error)
        return "it was stopped"

    def stop(self, timeout_s: float) -> None:
        """Stop its server in order, then the actor; by force after `timeout_s`."""
        ray.wait([self._actor.stop.remote()], timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and free what was set aside for it."""
        ray.kill(self._actor)
        self._free()

    def _result(self, call: Any, timeout_s: float | None) -> Any:  # Any: as above
        try:
            return ray.get(call, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, TwophaseError):
                raise error.cause from error
            raise PeerLost(self._name, first_line(error)) from error
        except GetTimeoutError as error:
            why = self._why_late() or "it does not come up"
            raise PeerLost(self._name, f"not up within {timeout_s:g} s: {why}") from error
        except RayActorError as error:
            raise PeerLost(self._name, first_line(error)) from error


def first_line(error: Exception) -> str:
    """What Ray says without its report of many lines."""
    return str(error).partition("\n")[0]
