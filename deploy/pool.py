"""One pool of Ray actors: each holds one server and nothing that Ray would have to carry.

Actors have `max_restarts=0`: a restarted actor would have lost its KV cache and would come back
under the old name. They run on the node of whoever starts them: their servers listen on loopback.
Ray carries configurations and addresses, never a token or a KV block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.errors import PeerLost, TwophaseError
from deploy.server import Server, ServerConfig

# start() blocks until the server is up; stop() must get through meanwhile.
MAX_CONCURRENCY = 2

Tell = Callable[[str], None]


class Pool:
    """The actors of one phase, or the router's."""

    def __init__(self, name: str, configs: Sequence[ServerConfig], *, num_cpus_each: float) -> None:
        self.name = name
        self._configs = tuple(configs)
        self._num_cpus_each = num_cpus_each
        # Any: Ray makes an actor's methods, and what they return, at run time.
        self._actors: list[Any] = []
        self._starting: list[Any] = []

    @property
    def num_cpus(self) -> float:
        """CPUs that all actors of the pool ask Ray for."""
        return len(self._configs) * self._num_cpus_each

    def launch(self) -> None:
        """Start all actors at once; `wait` tells how it went. Contract: called once."""
        actor_class = ray.remote(Server)
        here = ray.get_runtime_context().get_node_id()
        options = actor_class.options(
            num_cpus=self._num_cpus_each,
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        self._actors = [options.remote(config) for config in self._configs]
        self._starting = [actor.start.remote() for actor in self._actors]

    def wait(self, timeout_s: float, tell: Tell) -> list[str]:
        """host:port of each server, in order, once the last one is up.

        Raises:
            ModelError, ConfigError: one cannot start, as it says itself.
            PeerLost: one died, or none came up for `timeout_s`.
        """
        total = len(self._starting)
        pending = list(self._starting)
        while pending:
            tell(f"starting {self.name}: {total - len(pending)} of {total} up")
            done, pending = ray.wait(pending, timeout=timeout_s)
            if not done:
                raise PeerLost(self.name, f"not up within {timeout_s:g} s")
            _result(self.name, done[0])
        return [_result(self.name, start) for start in self._starting]

    def stop(self, *, timeout_s: float) -> None:
        """Stop all servers in order, then their actors; one that takes too long is killed."""
        stopping = [actor.stop.remote() for actor in self._actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


def _result(name: str, start: Any) -> str:  # Any: as in Pool
    try:
        return str(ray.get(start, timeout=0))
    except RayTaskError as error:
        if isinstance(error.cause, TwophaseError):
            raise error.cause from error
        raise
    except (RayActorError, GetTimeoutError) as error:
        raise PeerLost(name, str(error)) from error
