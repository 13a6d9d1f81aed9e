"""A whole cluster under Ray: one pool per phase, and the router in front.

Ray starts on this machine unless RAY_ADDRESS names a cluster to join; either way all actors run on
this machine, because the servers in them listen on loopback. Workers start in parallel;
the router is started when they listen. Stopping goes the other way: the router drains first.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from core.config import ClusterConfig
from deploy.plan import ClusterPlan
from deploy.pool import Pool

START_TIMEOUT_S = 600.0
STOP_MARGIN_S = 10.0
# Nothing goes through Ray's object store; this is the least that Ray takes.
OBJECT_STORE_BYTES = 80 << 20

Tell = Callable[[str], None]


@contextmanager
def ray_cluster(config: ClusterConfig, *, tell: Tell) -> Iterator[str]:
    """Run a cluster under Ray while the context lasts; yields the router's host:port.

    Args:
        config: the cluster.
        tell: called with a line about each step of the start and the stop.

    Raises:
        ModelError, ConfigError, PeerLost: it cannot start; nothing is left running then.
    """
    plan = ClusterPlan.of(config)
    pools = _pools(plan, config)
    tell("starting Ray")
    _init_ray(sum(pool.num_cpus for pool in pools))
    try:
        for pool in pools:
            pool.launch()
        workers = [address for pool in pools for address in pool.wait(START_TIMEOUT_S, tell)]
        router = Pool("router", [plan.router_with(workers)], num_cpus_each=0)
        router.launch()
        pools.insert(0, router)
        yield router.wait(START_TIMEOUT_S, tell)[0]
    finally:
        for pool in pools:
            tell(f"stopping {pool.name}")
            pool.stop(timeout_s=config.router.drain_s + STOP_MARGIN_S)
        ray.shutdown()


def _pools(plan: ClusterPlan, config: ClusterConfig) -> list[Pool]:
    pools = [Pool("decode", plan.decode, num_cpus_each=config.decode.num_worker_threads)]
    if config.prefill_pool is not None:
        num_cpus = config.prefill_pool.num_worker_threads
        pools.insert(0, Pool("prefill", plan.prefill, num_cpus_each=num_cpus))
    return pools


def _init_ray(num_cpus: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" in os.environ:
        ray.init(namespace="twophase", log_to_driver=False)
        return
    ray.init(
        namespace="twophase",
        # The workers' threads are what the machine is for; Ray's own count would refuse
        # two workers on one core, which a laptop may want.
        num_cpus=max(int(num_cpus), 1),
        include_dashboard=False,
        # A cluster on one machine is reached over loopback, and asks no network who it is.
        _node_ip_address="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
