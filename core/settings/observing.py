"""What is kept and told of requests: the sections `telemetry` and `tracing` of the YAML."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from core.settings.section import Section


class TracingConfig(Section):
    """One OpenTelemetry trace for each request, over router, prefill, transfer and decode.

    Without the section spans go nowhere.
    """

    endpoint: str
    """Of the collector: host:port for grpc, a URL (http://host:4318/v1/traces) for http."""
    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC, or over HTTP with protobuf."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are exported; those that come with a W3C traceparent are exported
    as its sampled flag says."""
    max_waiting_spans: int = Field(default=8192, ge=512)
    """Spans that may wait for the collector; of more, those of whole requests are dropped."""

    @model_validator(mode="after")
    def _fits_protocol(self) -> Self:
        is_url = self.endpoint.startswith(("http://", "https://"))
        if self.protocol == "http" and not is_url:
            raise ValueError(f"endpoint {self.endpoint!r} must be a URL for protocol http")
        if self.protocol == "grpc" and (is_url or ":" not in self.endpoint):
            raise ValueError(f"endpoint {self.endpoint!r} must be host:port for protocol grpc")
        return self


class TelemetryConfig(Section):
    """What is kept of requests and steps beyond what serving, placing and scaling need."""

    enabled: bool = True
    """false keeps nothing: no explain or diagnose, on /metrics only gauges and what links carried;
    `make bench-telemetry` tells what it costs."""
