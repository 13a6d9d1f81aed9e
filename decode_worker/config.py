"""What one decode worker is told; cut out of the cluster's configuration."""

from dataclasses import dataclass

from core.config import ClusterConfig, DecodeConfig, EngineConfig, Mode, TransferConfig
from core.request import WorkerName
from core.settings.chaos import ChaosConfig
from core.settings.observing import TelemetryConfig
from core.settings.security import SecurityConfig


@dataclass(frozen=True, slots=True)
class DecodeWorkerConfig:
    """Settings of one decode worker; `listen` is host:port, port 0 takes a free one.

    drain_s is the longest that it finishes what it has when it is stopped.
    """

    name: WorkerName
    listen: str
    model: str
    mode: Mode
    engine: EngineConfig
    pool: DecodeConfig
    transfer: TransferConfig
    drain_s: float
    security: SecurityConfig = SecurityConfig()
    chaos: ChaosConfig = ChaosConfig()
    cores: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None
    telemetry: TelemetryConfig = TelemetryConfig()

    @classmethod
    def from_cluster(
        cls, cluster: ClusterConfig, *, replica: int = 0, listen: str = "127.0.0.1:0"
    ) -> "DecodeWorkerConfig":
        """Settings of the replica-th worker of the decode pool."""
        return cls(
            name=WorkerName(f"decode-{replica}"),
            listen=listen,
            model=cluster.model,
            mode=cluster.mode,
            engine=cluster.engine_of(cluster.decode),
            pool=cluster.decode,
            transfer=cluster.transfer,
            drain_s=cluster.router.drain_s,
            security=cluster.security,
            chaos=cluster.chaos,
            cores=cluster.decode.cores_of(replica),
            gpus=cluster.decode.gpus_of(replica),
            telemetry=cluster.telemetry,
        )
