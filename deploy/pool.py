"""The workers of `twophase serve` as Ray actors, all on the machine of whoever starts them.

Their servers listen on loopback. Where Ray has several nodes on this machine, the first actors of a
pool are dealt out to all of them, so that the loss of one node is not the loss of a pool. Whoever
follows a lost one starts on the driver's own node: Ray takes a lost node for a living one for some
seconds more. `deploy.actors` places workers on other machines.
"""

from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.clock import MonotonicClock
from deploy.actors.actor import MAX_CONCURRENCY, Actor
from deploy.server import Server, ServerConfig
from deploy.supervisor import Slot


def slots_of(configs: Mapping[str, ServerConfig], *, num_cpus_each: float) -> list[Slot]:
    """A slot with an actor for each configuration, by name; all of them are starting."""

    def creator(number: int, name: str, config: ServerConfig) -> Callable[[], Actor]:
        numbers = chain([number], repeat(0))
        return lambda: Actor(name, _started(config, num_cpus_each, next(numbers)))

    clock = MonotonicClock()
    return [
        Slot(name, creator(number, name, config), clock)
        for number, (name, config) in enumerate(configs.items())
    ]


def _started(config: ServerConfig, num_cpus: float, number: int) -> Any:  # Any: a Ray handle
    """An actor on the `number`-th node of this machine, from 0, the driver's own."""
    nodes = _nodes_here()
    affinity = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
    options = ray.remote(Server).options(
        num_cpus=num_cpus,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=affinity,
    )
    return options.remote(config)


def _nodes_here() -> list[str]:
    """Ids of the living Ray nodes of this machine, the driver's own first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = cast(Any, ray).nodes()  # Any: Ray has no types for it
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return [own, *sorted(i for i, at in alive.items() if at == alive[own] and i != own)]
