"""What the router is told; cut out of the cluster's configuration."""

from dataclasses import dataclass

from core.config import ClusterConfig, Mode
from core.settings.observing import TelemetryConfig, TracingConfig
from core.settings.router import LocalPrefill, RouterConfig
from core.settings.security import SecurityConfig
from router.policy import DispatchPolicy


@dataclass(frozen=True, slots=True)
class FrontDoorConfig:
    """Settings of one router process; is_scaled: the pools' sizes are decided on as they serve."""

    model: str
    mode: Mode
    router: RouterConfig
    may_convert_dtype: bool = False
    security: SecurityConfig = SecurityConfig()
    tracing: TracingConfig | None = None
    telemetry: TelemetryConfig = TelemetryConfig()
    is_scaled: bool = False

    @property
    def dispatch(self) -> DispatchPolicy:
        """How requests are placed and recovered."""
        return DispatchPolicy(
            mode=self.mode,
            may_convert_dtype=self.may_convert_dtype,
            on_failure=self.router.on_failure,
            max_attempts=self.router.max_attempts,
            max_wait_s=self.router.max_wait_s,
            max_queued_requests=self.router.max_queued_requests,
            max_queue_s=self.router.max_queue_s,
            max_local_tokens=self._max_local_tokens,
        )

    @property
    def _max_local_tokens(self) -> int:
        is_allowed = self.router.local_prefill is LocalPrefill.AUTO
        return self.router.local_prefill_tokens if is_allowed else 0

    @property
    def listen(self) -> str:
        """host:port; port 0 takes a free one."""
        return f"{self.router.host}:{self.router.port}"

    @classmethod
    def from_cluster(cls, cluster: ClusterConfig) -> "FrontDoorConfig":
        """The router's part of a cluster's configuration."""
        return cls(
            model=cluster.model,
            mode=cluster.mode,
            router=cluster.router,
            may_convert_dtype=cluster.transfer.convert_dtype,
            security=cluster.security,
            tracing=cluster.tracing,
            telemetry=cluster.telemetry,
            is_scaled=cluster.scaling is not None,
        )
