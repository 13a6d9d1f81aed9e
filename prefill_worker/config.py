"""What one prefill worker is told; cut out of the cluster's configuration."""

from dataclasses import dataclass

from core.config import ClusterConfig, EngineConfig, PrefillConfig, TransferConfig
from core.errors import ConfigError
from core.request import WorkerName
from core.settings.chaos import ChaosConfig
from core.settings.security import SecurityConfig


@dataclass(frozen=True, slots=True)
class PrefillWorkerConfig:
    """Settings of one prefill worker; `listen` is host:port, port 0 takes a free one.

    drain_s is the longest that it finishes what it has when it is stopped.
    """

    name: WorkerName
    listen: str
    model: str
    engine: EngineConfig
    pool: PrefillConfig
    transfer: TransferConfig
    drain_s: float
    security: SecurityConfig = SecurityConfig()
    chaos: ChaosConfig = ChaosConfig()
    cores: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None

    @classmethod
    def from_cluster(
        cls, cluster: ClusterConfig, *, replica: int = 0, listen: str = "127.0.0.1:0"
    ) -> "PrefillWorkerConfig":
        """Settings of the replica-th worker of the prefill pool."""
        pool = cluster.prefill_pool
        if pool is None:
            raise ConfigError("mode", f"{cluster.mode} has no prefill workers")
        return cls(
            name=WorkerName(f"prefill-{replica}"),
            listen=listen,
            model=cluster.model,
            engine=cluster.engine_of(pool),
            pool=pool,
            transfer=cluster.transfer,
            drain_s=cluster.router.drain_s,
            security=cluster.security,
            chaos=cluster.chaos,
            cores=pool.cores_of(replica),
            gpus=pool.gpus_of(replica),
        )
