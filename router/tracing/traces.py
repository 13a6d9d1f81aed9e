"""Which trace a request belongs to, and that it is told when the request ended.

Off unless configured; then a request still keeps the trace id that its client gave it, for the
logs of router and workers. Runs in the router's event loop.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from core.clock import Clock
from core.completion import Completion
from core.request import Request
from core.settings.observing import TracingConfig
from router.timeline.record import Record
from router.tracing.context import TraceContext
from router.tracing.spans import Span, request_span

if TYPE_CHECKING:  # the SDK is an extra: loaded where tracing is configured
    from router.tracing.export import Exporter


class Traces:
    """The traces of one router; `counts` tells what became of spans."""

    def __init__(
        self, clock: Clock, *, ratio: float = 0.0, exporter: "Exporter | None" = None
    ) -> None:
        self._clock = clock
        self._ratio = ratio
        self._exporter = exporter

    @property
    def counts(self) -> dict[str, int]:
        """Spans by what became of them; empty where tracing is off."""
        return {} if self._exporter is None else self._exporter.counts

    def begun(self, told: TraceContext | None) -> TraceContext | None:
        """The trace of a request that came; None where it is of none."""
        if told is not None or self._exporter is None:
            return told
        trace_id = f"{random.getrandbits(128) or 1:032x}"
        return TraceContext(trace_id, "", is_sampled=random.random() < self._ratio)

    def ended(
        self,
        context: TraceContext | None,
        completion: Completion,
        record: Record,
        request: Request,
        *,
        model: str,
        operation: str,
    ) -> None:
        """An answer ended: its spans are made and exported beside the event loop."""
        if self._exporter is None or context is None or not context.is_sampled:
            return
        from router.tracing.export import Traced

        def make_span() -> Span:
            events = record.events(completion.phases.total_s)
            return request_span(
                completion, events, request.sampling, model=model, operation=operation
            )

        wall_s = time.time() - self._clock.now_s()
        self._exporter.put(Traced(make_span, context, wall_s))


@asynccontextmanager
async def running_traces(config: TracingConfig | None, clock: Clock) -> AsyncIterator[Traces]:
    """The traces of a router while it runs; the end waits some seconds at most for the collector.

    Raises:
        ConfigError: tracing is configured, and the extra `otel` is not installed.
    """
    if config is None:
        yield Traces(clock)
        return
    from router.tracing.export import Exporter

    exporter = Exporter(config)
    try:
        yield Traces(clock, ratio=config.sample_ratio, exporter=exporter)
    finally:
        await asyncio.to_thread(exporter.close)
