"""A pool of Ray actors: each holds one server and nothing that Ray would have to carry.

Actors have `max_restarts=0`: a restarted actor would have lost its KV cache and would come back
under the old name as if nothing had happened. Whoever starts a lost one again (`deploy.supervisor`)
gets a new actor. They run on the machine of whoever starts them, since their servers listen on
loopback; where Ray has several nodes there, the first actors of a pool are dealt out to all of
them, so that the loss of one node is not the loss of a pool. Whoever follows a lost one starts on
the driver's own node: Ray takes a lost node for a living one for some seconds more.
Ray carries configurations and addresses, never a token or a KV block.
"""

from collections.abc import Callable, Mapping
from itertools import chain, repeat
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

    def __init__(self, name: str, config: ServerConfig, *, num_cpus: float, number: int) -> None:
        """Start it on the `number`-th node of this machine, from 0, the driver's own."""
        actor_class = ray.remote(Server)
        nodes = _nodes_here()
        options = actor_class.options(
            num_cpus=num_cpus,
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                nodes[number % len(nodes)], soft=False
            ),
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


def _nodes_here() -> list[str]:
    """Ids of the living Ray nodes of this machine, the driver's own first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = cast(Any, ray).nodes()  # Any: Ray has no types for it
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return [own, *sorted(i for i, at in alive.items() if at == alive[own] and i != own)]


def _first_line(error: Exception) -> str:
    """What Ray says without its report of many lines."""
    return str(error).partition("\n")[0]


def slots_of(configs: Mapping[str, ServerConfig], *, num_cpus_each: float) -> list[Slot]:
    """A slot with an actor for each configuration, by name; all of them are starting."""

    def creator(number: int, name: str, config: ServerConfig) -> Callable[[], Actor]:
        numbers = chain([number], repeat(0))
        return lambda: Actor(name, config, num_cpus=num_cpus_each, number=next(numbers))

    clock = MonotonicClock()
    return [
        Slot(name, creator(number, name, config), clock)
        for number, (name, config) in enumerate(configs.items())
    ]
