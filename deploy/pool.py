"""A pool of Ray actors: each holds one server and nothing that Ray would have to carry.

Actors have `max_restarts=0`: a restarted actor would have lost its KV cache and would come back
under the old name as if nothing had happened. Whoever starts a lost one again (`deploy.supervisor`)
gets a new actor. They run on the node of whoever starts them: their servers listen on loopback.
Ray carries configurations and addresses, never a token or a KV block.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.clock import MonotonicClock
from core.errors import PeerLost, TwophaseError
from deploy.server import Server, ServerConfig
from deploy.supervisor import Slot

START_TIMEOUT_S = 600.0
# start() blocks until the server is up and wait() until it ends; stop() must get through meanwhile.
MAX_CONCURRENCY = 3


class Actor:
    """One server in an actor of its own."""

    def __init__(self, name: str, config: ServerConfig, *, num_cpus: float) -> None:
        actor_class = ray.remote(Server)
        here = ray.get_runtime_context().get_node_id()
        options = actor_class.options(
            num_cpus=num_cpus,
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        self._name = name
        # Any: Ray makes an actor's methods, and what they return, at run time.
        self._actor = cast(Any, options.remote(config))
        self._starting = self._actor.start.remote()

    def wait_until_up(self) -> str:
        """host:port of its server.

        Raises:
            ModelError, ConfigError: it cannot start, as it says itself.
            PeerLost: it died, or did not come up in START_TIMEOUT_S.
        """
        return str(self._result(self._starting, START_TIMEOUT_S))

    def wait(self) -> str:
        """Block until its server has ended, or the actor died; why."""
        try:
            self._result(self._actor.wait.remote(), None)
        except TwophaseError as error:
            return str(error)
        return "it was stopped"

    def stop(self, timeout_s: float) -> None:
        """Stop its server in order, then the actor; by force after `timeout_s`."""
        ray.wait([self._actor.stop.remote()], timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the actor at once."""
        ray.kill(self._actor)

    def _result(self, call: Any, timeout_s: float | None) -> Any:
        try:
            return ray.get(call, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, TwophaseError):
                raise error.cause from error
            raise PeerLost(self._name, _first_line(error)) from error
        except (RayActorError, GetTimeoutError) as error:
            raise PeerLost(self._name, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    """What Ray says without its report of many lines."""
    return str(error).partition("\n")[0]


def slots_of(configs: Mapping[str, ServerConfig], *, num_cpus_each: float) -> list[Slot]:
    """A slot with an actor for each configuration, by name; all of them are starting."""

    def creator(name: str, config: ServerConfig) -> Callable[[], Actor]:
        return lambda: Actor(name, config, num_cpus=num_cpus_each)

    clock = MonotonicClock()
    return [Slot(name, creator(name, config), clock) for name, config in configs.items()]
