"""Which servers a cluster's configuration asks for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.config import ClusterConfig
from core.errors import ConfigError
from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from router.config import FrontDoorConfig


def refuse_skewed_clocks(config: ClusterConfig) -> None:
    """Raise ConfigError where processes of Ray shall have other clocks, for they cannot."""
    if config.chaos.clock_skew_s:
        limit = "only child processes have clocks of their own: --without-ray, or twophase chaos"
        raise ConfigError("chaos.clock_skew_s", f"is {config.chaos.clock_skew_s}: {limit}")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The servers of one cluster; `prefill` is empty where decode workers read the prompts."""

    prefill: tuple[PrefillWorkerConfig, ...]
    decode: tuple[DecodeWorkerConfig, ...]
    router: FrontDoorConfig

    @classmethod
    def of(cls, cluster: ClusterConfig) -> "ClusterPlan":
        """The servers that `cluster` describes; workers take free ports on loopback."""
        prefill_pool = cluster.prefill_pool
        num_prefill = prefill_pool.replicas if prefill_pool is not None else 0
        return cls(
            prefill=tuple(
                PrefillWorkerConfig.from_cluster(cluster, replica=i) for i in range(num_prefill)
            ),
            decode=tuple(
                DecodeWorkerConfig.from_cluster(cluster, replica=i)
                for i in range(cluster.decode.replicas)
            ),
            router=FrontDoorConfig.from_cluster(cluster),
        )

    def listening_at(self, address: Callable[[], str]) -> "ClusterPlan":
        """The same servers, each worker at an address of its own: host:port from `address`."""
        return replace(
            self,
            prefill=tuple(replace(worker, listen=address()) for worker in self.prefill),
            decode=tuple(replace(worker, listen=address()) for worker in self.decode),
        )

    def router_with(self, worker_addresses: Sequence[str]) -> FrontDoorConfig:
        """The router's configuration, told of the workers that were started."""
        workers = (*self.router.router.workers, *worker_addresses)
        return replace(
            self.router, router=self.router.router.model_copy(update={"workers": workers})
        )
