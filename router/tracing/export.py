"""Spans to an OpenTelemetry collector, from a thread of their own.

The event loop puts requests that ended into a bounded queue and goes on; the thread makes spans of
them, which the SDK's BatchSpanProcessor hands to the OTLP exporter in a second thread. A collector
that is slow or dead costs spans, which are counted, and no request any time.

The SDK is an extra of the package (`otel`): imported only where tracing is configured.
"""

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError
from core.settings.observing import TracingConfig
from router.tracing.context import TraceContext
from router.tracing.spans import Span

try:
    from opentelemetry import trace as otel
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
except ImportError as error:
    raise ConfigError(
        "tracing", f"needs the extra otel: pip install 'twophase[otel]' ({error})"
    ) from error

# The exporter tries again until then; a batch that is not taken by then is lost.
EXPORT_TIMEOUT_S = 5.0
CLOSE_LIMIT_S = 2.0
# Requests that may wait for the thread.
MAX_REQUESTS = 512

_log = logging.getLogger("twophase.router")


@dataclass(frozen=True, slots=True)
class Traced:
    """What an ended request's spans are made of; wall_s is what turns its times into wall time."""

    make_span: Callable[[], Span]
    context: TraceContext
    wall_s: float


class _Ids(RandomIdGenerator):
    """The trace id that the request was given when it came; of spans, random ones."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class _Counting(SpanExporter):
    """The OTLP exporter; counts what became of spans."""

    def __init__(self, exporter: SpanExporter, counts: Counter[str]) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        with contextlib.suppress(Exception):  # whatever it was: spans are lost, nothing else
            result = self._exporter.export(spans)
        is_taken = result is SpanExportResult.SUCCESS
        self._counts["exported" if is_taken else "failed"] += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Exporter:
    """Takes what ended, and tells what became of its spans; to be closed.

    Invariant: of the spans that were made, each is waiting, exported, failed or dropped.
    """

    def __init__(self, config: TracingConfig) -> None:
        self._max_waiting_spans = config.max_waiting_spans
        self._counts: Counter[str] = Counter(exported=0, failed=0, dropped=0)
        self._queue: queue.Queue[Traced | None] = queue.Queue(MAX_REQUESTS)
        self._num_made = 0
        self._ids = _Ids()
        self._exporter = _Counting(_otlp(config), self._counts)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=config.max_waiting_spans
        )
        self._tracers: dict[tuple[str, str], otel.Tracer] = {}
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export what waits; may block for some seconds, also where the collector is dead."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
        self._thread.join(CLOSE_LIMIT_S)
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)
        if closing.is_alive():  # it tries a dead collector again and again
            self._exporter.shutdown()
            closing.join(CLOSE_LIMIT_S)

    @property
    def counts(self) -> dict[str, int]:
        """Spans by what became of them."""
        return dict(self._counts)

    def put(self, traced: Traced) -> None:
        """Have spans made of a request that ended; returns at once, whatever the collector does."""
        try:
            self._queue.put_nowait(traced)
        except queue.Full:
            self._counts["dropped"] += 1

    def _run(self) -> None:
        while (traced := self._queue.get()) is not None:
            try:
                self._make(traced)
            except Exception:  # root of the thread: the next request is traced
                _log.exception("a request could not be traced")

    def _make(self, traced: Traced) -> None:
        span, num_done = traced.make_span(), self._counts["exported"] + self._counts["failed"]
        if self._num_made - num_done + span.num_spans > self._max_waiting_spans:
            self._counts["dropped"] += span.num_spans
            return
        self._num_made += span.num_spans
        context = traced.context
        self._ids.trace_id = int(context.trace_id, 16)
        parent = otel.INVALID_SPAN_CONTEXT
        if context.parent_span_id:
            parent = otel.SpanContext(
                self._ids.trace_id,
                int(context.parent_span_id, 16),
                is_remote=True,
                trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
                trace_state=otel.TraceState.from_header([context.state]),
            )
        self._emit(span, parent, traced.wall_s, otel.SpanKind.SERVER)

    def _emit(
        self, span: Span, parent: otel.SpanContext, wall_s: float, kind: otel.SpanKind
    ) -> None:
        made = self._tracer(span.service, span.where).start_span(
            span.name,
            context=otel.set_span_in_context(otel.NonRecordingSpan(parent)),
            kind=kind,
            attributes=span.attributes,
            start_time=_ns(span.begin_s + wall_s),
        )
        for instant in span.instants:
            made.add_event(instant.name, instant.attributes, _ns(instant.at_s + wall_s))
        if span.error:
            made.set_status(otel.Status(otel.StatusCode.ERROR, span.error))
        for child in span.children:
            self._emit(child, made.get_span_context(), wall_s, otel.SpanKind.INTERNAL)
        made.end(_ns(span.end_s + wall_s))

    def _tracer(self, service: str, where: str) -> otel.Tracer:
        """Of a service, as the collector is to know it: each worker is an instance of its own."""
        if (service, where) not in self._tracers:
            resource = Resource.create(
                {
                    "service.namespace": "twophase",
                    "service.name": f"twophase-{service}",
                    "service.instance.id": where,
                }
            )
            provider = TracerProvider(
                resource=resource,
                sampler=ALWAYS_ON,  # decided as the request came
                id_generator=self._ids,
                shutdown_on_exit=False,
            )
            provider.add_span_processor(self._processor)
            self._tracers[service, where] = provider.get_tracer("twophase")
        return self._tracers[service, where]


def _otlp(config: TracingConfig) -> SpanExporter:
    if config.protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter

    return trace_exporter.OTLPSpanExporter(
        endpoint=config.endpoint, insecure=True, timeout=EXPORT_TIMEOUT_S
    )


def _ns(wall_s: float) -> int:
    return int(wall_s * 1e9)
