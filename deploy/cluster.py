"""A whole cluster under Ray: one pool per phase, and the router in front.

Ray starts on this machine unless RAY_ADDRESS names a cluster to join; either way all actors run on
this machine, because the servers in them listen on loopback. Workers start in parallel;
the router is started when they listen. Stopping goes the other way: the router drains first.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import ray

from core.config import ClusterConfig
from core.worker import Role
from decode_worker.config import DecodeWorkerConfig
from deploy.container import free_shared_memory, shared_memory_problem
from deploy.live_config import LiveConfig
from deploy.plan import ClusterPlan, refuse_skewed_clocks
from deploy.pool import slots_of
from deploy.ports import require_free, reserved_address
from deploy.scaler import Scaler
from deploy.server import ServerConfig
from deploy.supervisor import Slot, Supervisor, stop_timeout_s, stop_together
from prefill_worker.config import PrefillWorkerConfig

# Nothing goes through Ray's object store; this is the least that Ray takes.
OBJECT_STORE_BYTES = 80 << 20

Tell = Callable[[str], None]

_log = logging.getLogger("twophase.deploy")


@contextmanager
def ray_cluster(
    config: ClusterConfig,
    *,
    tell: Tell,
    replace_lost: bool = False,
    live: LiveConfig | None = None,
) -> Iterator[str]:
    """Run a cluster under Ray while the context lasts; yields the router's host:port.

    Args:
        config: the cluster.
        tell: called with a line about each step of the start and the stop.
        live: the same configuration, for who changes it while the cluster runs.
        replace_lost: whether a worker that ends, or whose actor dies, is followed by another.

    Raises:
        ModelError, ConfigError, PeerLost: it cannot start; nothing is left running then.
    """
    refuse_skewed_clocks(config)
    require_free(config.router)
    limit_s = stop_timeout_s(config)
    with ExitStack() as stack:
        may_end = threading.Event()
        stack.callback(may_end.set)
        plan = ClusterPlan.of(config).listening_at(lambda: reserved_address(stack))
        tell("starting Ray")
        _init_ray(_num_cpus(config))
        stack.callback(ray.shutdown)
        workers = _start_workers(plan, config)
        stack.callback(stop_together, workers, limit_s)
        for number, slot in enumerate(workers):
            tell(f"starting workers: {number} of {len(workers)} up")
            slot.wait_until_up()
        named = plan.router_with([slot.address for slot in workers])
        (router,) = slots_of({"router": named}, num_cpus_each=0)
        stack.callback(stop_together, [router], limit_s)
        router.wait_until_up()
        supervisor = Supervisor(workers)
        stack.callback(supervisor.close)  # before anything is stopped
        if replace_lost:
            supervisor.watch(router.address, config.security)
        if config.scaling is not None:

            def create(role: Role, index: int, address: str | None) -> Slot:
                return _one_more(config, role, index, address or reserved_address(stack))

            scaler = Scaler(live or LiveConfig(config), workers, create, supervisor, may_end)
            stack.callback(scaler.close)
            scaler.watch(router.address)
        yield router.address
        tell("stopping")


def _start_workers(plan: ClusterPlan, config: ClusterConfig) -> list[Slot]:
    decode: dict[str, ServerConfig] = {worker.name: worker for worker in plan.decode}
    slots = slots_of(decode, num_cpus_each=config.decode.num_worker_threads)
    if config.prefill_pool is not None:
        prefill: dict[str, ServerConfig] = {worker.name: worker for worker in plan.prefill}
        slots += slots_of(prefill, num_cpus_each=config.prefill_pool.num_worker_threads)
    return slots


def _one_more(config: ClusterConfig, role: Role, index: int, listen: str) -> Slot:
    """A worker that scaling adds; it starts."""
    worker: ServerConfig
    if role is Role.PREFILL:
        worker = PrefillWorkerConfig.from_cluster(config, replica=index, listen=listen)
    else:
        worker = DecodeWorkerConfig.from_cluster(config, replica=index, listen=listen)
    (slot,) = slots_of({worker.name: worker}, num_cpus_each=worker.pool.num_worker_threads)
    return slot


def _num_cpus(config: ClusterConfig) -> int:
    pools = {"decode": config.decode, "prefill": config.prefill_pool}
    numbers = {name: pool.replicas for name, pool in pools.items() if pool is not None}
    if config.scaling is not None:
        bounds = {"decode": config.scaling.decode, "prefill": config.scaling.prefill}
        numbers = {name: bound.max_replicas for name, bound in bounds.items() if bound is not None}
    return sum(
        pool.num_worker_threads * numbers[name] for name, pool in pools.items() if pool is not None
    )


def _init_ray(num_cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" in os.environ:
        ray.init(namespace="twophase", log_to_driver=False)
        return
    problem = shared_memory_problem(free_shared_memory(), OBJECT_STORE_BYTES)
    if problem is not None:
        _log.warning("%s", problem)
    ray.init(
        namespace="twophase",
        # The workers' threads are what the machine is for; Ray's own count would refuse
        # two workers on one core, which a laptop may want.
        num_cpus=max(num_cpus, 1),
        include_dashboard=False,
        # A cluster on one machine is reached over loopback, and asks no network who it is.
        _node_ip_address="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
