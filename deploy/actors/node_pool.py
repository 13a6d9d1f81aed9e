"""The servers of one cluster as named, detached actors on the nodes of a Ray cluster.

Named, so that who comes later finds them; detached, so that they outlive whoever started them.
`twophase down` ends them, or Ray's own end.
"""

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.clock import MonotonicClock
from core.config import ClusterConfig
from core.worker import Role
from decode_worker.config import DecodeWorkerConfig
from deploy.actors.actor import MAX_CONCURRENCY, START_TIMEOUT_S, Actor
from deploy.actors.name import CONTROLLER, NAMESPACE, ROUTER, actor_name, server_of_name
from deploy.actors.node_choice import Need
from deploy.actors.node_server import NodeServer
from deploy.actors.place import Place, Places
from deploy.live_config import LiveConfig
from deploy.server import ServerConfig
from deploy.supervisor import Slot
from prefill_worker.config import PrefillWorkerConfig
from router.config import FrontDoorConfig


class NodePool:
    """Makes slots whose first replica is an actor that lives, if there is one, else a new one."""

    def __init__(self, cluster: str, live: LiveConfig) -> None:
        self._cluster = cluster
        self._live = live
        self.places = Places(cluster, asks_for_nodes=lambda: asks_for_nodes(live.current))

    def living(self) -> list[str]:
        """Names of the cluster's servers whose actors live, or wait for their place."""
        return [name for name in servers_of(self._cluster) if name != CONTROLLER]

    def worker(self, role: Role, index: int) -> Slot:
        """The slot of a worker."""
        config = _worker_config(self._live.current, role, index)
        need = Need.of(config.pool, config.engine.device)
        name = config.name

        def create() -> Actor:
            place = self.places.take(name, role, need)
            try:
                return self._actor(name, self._started(name, config, place), place)
            except BaseException:
                self.places.free(place)
                raise

        def adopt() -> Actor:
            place = self.places.adopt(name, role, need)
            return self._actor(name, ray.get_actor(self._named(name), NAMESPACE), place)

        return self._slot(name, create, adopt)

    def router(self, worker_addresses: Callable[[], list[str]]) -> Slot:
        """The slot of the router; each that starts is told the workers' addresses as of then."""

        def create() -> Actor:
            front = FrontDoorConfig.from_cluster(self._live.current)
            workers = (*front.router.workers, *worker_addresses())
            told = front.router.model_copy(update={"workers": workers})
            config = FrontDoorConfig(
                front.model, front.mode, told, front.may_convert_dtype, front.security
            )
            return self._actor(ROUTER, self._started(ROUTER, config, None), None)

        def adopt() -> Actor:
            return self._actor(ROUTER, ray.get_actor(self._named(ROUTER), NAMESPACE), None)

        return self._slot(ROUTER, create, adopt)

    def _slot(self, name: str, create: Callable[[], Actor], adopt: Callable[[], Actor]) -> Slot:
        first = adopt if name in self.living() else create
        makers = chain([first], repeat(create))
        return Slot(name, lambda: next(makers)(), MonotonicClock())

    def _started(self, name: str, config: ServerConfig, place: Place | None) -> Any:  # a Ray handle
        # Any: options of many kinds.
        resources = self._live.current.router.resources
        options: dict[str, Any] = {"num_cpus": 0, "resources": resources}
        if place is not None:
            own = dict(place.need.bundle)
            options = {
                "num_cpus": own.pop("CPU"),
                "num_gpus": own.pop("GPU", 0.0),
                "resources": own,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group),
            }
        actor_class = ray.remote(NodeServer).options(
            name=self._named(name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            **options,
        )
        return actor_class.remote(config)

    def _actor(self, name: str, handle: Any, place: Place | None) -> Actor:  # Any: a Ray handle
        scaling = self._live.current.scaling
        timeout_s = scaling.start_timeout_s if scaling else START_TIMEOUT_S
        if place is None:
            return Actor(name, handle, start_timeout_s=timeout_s)
        return Actor(
            name,
            handle,
            start_timeout_s=timeout_s,
            free=lambda: self.places.free(place),
            why_late=place.why_pending,
        )

    def _named(self, name: str) -> str:
        return actor_name(self._cluster, name)


def asks_for_nodes(config: ClusterConfig) -> bool:
    """Whether Ray's autoscaler is told what the workers take."""
    return config.scaling is not None and config.scaling.ask_for_nodes


def servers_of(cluster: str) -> list[str]:
    """Names of the servers whose actors Ray knows in the cluster; the driver is in NAMESPACE."""
    names = (server_of_name(cluster, name) for name in cast(Any, ray.util).list_named_actors())
    return sorted(name for name in names if name is not None)


def _worker_config(
    config: ClusterConfig, role: Role, index: int
) -> PrefillWorkerConfig | DecodeWorkerConfig:
    if role is Role.PREFILL:
        return PrefillWorkerConfig.from_cluster(config, replica=index)
    return DecodeWorkerConfig.from_cluster(config, replica=index)
