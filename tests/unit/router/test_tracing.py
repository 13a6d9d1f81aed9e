"""Spans of requests that ended: the right ones, and never at a request's expense."""

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import router.tracing.export
from core.clock import ManualClock
from core.config import load_config
from core.errors import ConfigError
from core.events.event import ROUTER, Event, EventKind
from core.request import SamplingParams
from core.settings.observing import TracingConfig
from router.timeline.record import Record
from router.tracing.context import TraceContext, trace_context
from router.tracing.export import Exporter, Traced
from router.tracing.spans import request_span
from router.tracing.traces import Traces, running_traces
from tests.unit.core.test_diagnosis import HEALTHY
from tests.unit.router.doubles import make_request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOLD = TraceContext(TRACE, PARENT, is_sampled=True, state="vendor=1")
CONFIG = TracingConfig(endpoint="127.0.0.1:4317", max_waiting_spans=512)


class TestContext:
    def test_of_the_standards_own_example(self):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
        assert trace_context(headers) == TOLD

    @pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("02", False), ("03", True)])
    def test_only_the_lowest_flag_says_sampled(self, flags, is_sampled):
        told = trace_context({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        assert told.is_sampled is is_sampled

    def test_a_later_version_may_tell_more(self):
        told = trace_context({"traceparent": f"cc-{TRACE}-{PARENT}-01-what-comes"})
        assert told.trace_id == TRACE

    @pytest.mark.parametrize(
        "told",
        [
            "",
            "00",
            f"ff-{TRACE}-{PARENT}-01",
            f"00-{TRACE}-{PARENT}-01-more",
            f"00-{'0' * 32}-{PARENT}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE.upper()}-{PARENT}-01",
            f"00-{TRACE[:-1]}-{PARENT}-01",
            f"00-{TRACE}-{PARENT}-0x",
        ],
    )
    def test_what_is_not_valid_is_no_trace(self, told):
        assert trace_context({"traceparent": told}) is None

    def test_a_state_that_is_too_long_is_left_out(self):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "v=" + "1" * 600}
        assert trace_context(headers).state == ""


def at(kind, begin_s, end_s, where=ROUTER, **more):
    return Event(kind, begin_s, end_s, where, **more)


EVENTS = [
    at(EventKind.RECEIVED, 10.0, 10.0),
    at(EventKind.TOKENIZE, 10.0, 10.1),
    at(EventKind.PLACED, 10.2, 10.2, note="idle"),
    at(EventKind.FAILED, 10.2, 10.3, note="decode-0: killed"),
    at(EventKind.QUEUE, 10.3, 10.4, "prefill-0", attempt=2),
    at(EventKind.CHUNK, 10.4, 10.5, "prefill-0", attempt=2, num_tokens=64),
    at(EventKind.PUSH, 10.45, 10.55, "prefill-0", attempt=2, num_bytes=99),
    at(EventKind.SLOT_WAIT, 10.6, 10.7, "decode-1", attempt=2),
    at(EventKind.GAP, 10.7, 10.9, "decode-1", attempt=2, request_ids=("other",)),
]


def made():
    return request_span(HEALTHY, EVENTS, SamplingParams(max_tokens=9), model="m", operation="chat")


class TestSpans:
    def test_a_request_has_its_phases_below_it_each_where_it_happened(self):
        span = made()
        below = {child.name: child for child in span.children}
        assert list(below) == ["tokenize", "failed", "prefill", "transfer", "decode"]
        assert [below[n].service for n in below] == [ROUTER, ROUTER, "prefill", "prefill", "decode"]
        assert (below["prefill"].begin_s, below["prefill"].end_s) == (10.3, 10.5)
        assert [child.name for child in below["decode"].children] == ["slot_wait", "gap"]
        assert [instant.name for instant in span.instants] == ["received", "placed"]
        assert span.num_spans == 1 + 2 + 3 + 2 + 3

    def test_attributes_are_those_of_the_conventions_and_tell_no_text(self):
        span = made()
        assert span.name == "chat m"
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.max_tokens"] == 9
        assert span.attributes["gen_ai.usage.input_tokens"] == HEALTHY.usage.num_prompt_tokens
        assert span.attributes["gen_ai.response.finish_reasons"] == [HEALTHY.finish_reason.value]
        gap = span.children[-1].children[-1]
        assert gap.attributes["twophase.request_ids"] == ["other"]

    def test_a_failed_attempt_says_why(self):
        span = made()
        assert (span.error, span.children[1].error) == ("", "decode-0: killed")


@pytest.fixture
def collector(monkeypatch):
    """What a collector got; its exporter is put in the place of OTLP's."""
    taken = InMemorySpanExporter()
    monkeypatch.setattr(router.tracing.export, "_otlp", lambda config: taken)
    return taken


def traced(context=TOLD):
    return Traced(made, context, wall_s=1_000.0)


class TestExporter:
    def test_all_spans_are_of_the_clients_trace_and_each_has_its_service(self, collector):
        exporter = Exporter(CONFIG)
        exporter.put(traced())
        exporter.close()
        spans = collector.get_finished_spans()
        assert exporter.counts == {"exported": len(spans), "failed": 0, "dropped": 0}
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
        (root,) = [span for span in spans if span.name == "chat m"]
        assert f"{root.parent.span_id:016x}" == PARENT
        assert root.context.trace_state.to_header() == "vendor=1"
        assert root.start_time == 1_010 * 10**9
        ids = {span.context.span_id for span in spans} | {root.parent.span_id}
        assert all(span.parent.span_id in ids for span in spans)
        services = {
            (
                span.resource.attributes["service.name"],
                span.resource.attributes["service.instance.id"],
            )
            for span in spans
        }
        assert services == {
            ("twophase-router", "router"),
            ("twophase-prefill", "prefill-0"),
            ("twophase-decode", "decode-1"),
        }

    def test_a_request_without_a_parent_has_the_trace_id_that_the_logs_tell(self, collector):
        exporter = Exporter(CONFIG)
        exporter.put(traced(TraceContext("ab" * 16, "", is_sampled=True)))
        exporter.close()
        spans = collector.get_finished_spans()
        assert {f"{span.context.trace_id:032x}" for span in spans} == {"ab" * 16}
        assert [span.name for span in spans if span.parent is None] == ["chat m"]

    def test_a_slow_collector_costs_spans_and_no_time(self, monkeypatch):
        class Slow(SpanExporter):
            def export(self, spans):
                assert is_over.wait(10.0)
                return SpanExportResult.SUCCESS

        is_over = threading.Event()
        monkeypatch.setattr(router.tracing.export, "_otlp", lambda config: Slow())
        exporter = Exporter(CONFIG)
        began_s = time.monotonic()
        for _ in range(2_000):
            exporter.put(traced())
        assert time.monotonic() - began_s < 2.0
        is_over.set()
        exporter.close()
        assert exporter.counts["dropped"] > 0

    def test_over_http_spans_are_posted_to_the_url(self):
        posted = []

        class Collector(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                posted.append(
                    (self.path, trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        with HTTPServer(("127.0.0.1", 0), Collector) as server:
            serving = threading.Thread(target=server.serve_forever, args=(0.01,))
            serving.start()
            url = f"http://127.0.0.1:{server.server_port}/v1/traces"
            exporter = Exporter(TracingConfig(endpoint=url, protocol="http"))
            exporter.put(traced())
            exporter.close()
            server.shutdown()
            serving.join()
        ((path, request),) = posted
        assert path == "/v1/traces"
        assert len(request.resource_spans) == 3
        assert exporter.counts["exported"] == made().num_spans

    @pytest.mark.parametrize(
        ("protocol", "before", "after"), [("grpc", "", ""), ("http", "http://", "/")]
    )
    def test_a_dead_collector_is_counted_and_holds_up_no_end(
        self, monkeypatch, protocol, before, after
    ):
        monkeypatch.setattr(router.tracing.export, "CLOSE_LIMIT_S", 0.5)
        others = set(threading.enumerate())
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            endpoint = f"{before}127.0.0.1:{nobody.getsockname()[1]}{after}"
            exporter = Exporter(TracingConfig(endpoint=endpoint, protocol=protocol))
            exporter.put(traced())
            began_s = time.monotonic()
            exporter.close()
        assert time.monotonic() - began_s < 3.0
        assert exporter.counts["exported"] == 0
        assert not [
            t for t in threading.enumerate() if t not in others and "otel" in t.name.lower()
        ]


class TestTraces:
    def ended(self, traces, context):
        record = Record(0.0, 0.0)
        traces.ended(context, HEALTHY, record, make_request(), model="m", operation="chat")

    def test_what_the_client_did_not_sample_is_not_exported(self, collector):
        exporter = Exporter(CONFIG)
        traces = Traces(ManualClock(), ratio=1.0, exporter=exporter)
        self.ended(traces, traces.begun(TraceContext(TRACE, PARENT, is_sampled=False)))
        self.ended(traces, traces.begun(TOLD))
        exporter.close()
        (root,) = [span for span in collector.get_finished_spans() if span.name == "chat m"]
        assert f"{root.parent.span_id:016x}" == PARENT

    def test_the_ratio_decides_over_requests_that_begin_a_trace(self):
        traces = Traces(ManualClock(), ratio=0.25, exporter=object())
        begun = [traces.begun(None) for _ in range(2_000)]
        assert len({context.trace_id for context in begun}) == 2_000
        assert 350 < sum(context.is_sampled for context in begun) < 650

    def test_off_a_request_keeps_the_trace_that_it_came_with(self):
        traces = Traces(ManualClock())
        assert (traces.begun(None), traces.begun(TOLD), traces.counts) == (None, TOLD, {})
        self.ended(traces, TOLD)

    async def test_without_the_extra_it_is_refused_with_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "opentelemetry", None)
        monkeypatch.delitem(sys.modules, "router.tracing.export")
        with pytest.raises(
            ConfigError, match=r"needs the extra otel: pip install 'twophase\[otel\]'"
        ):
            async with running_traces(CONFIG, ManualClock()):
                pass


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["tracing.sample_ratio=0.5"], "tracing.endpoint"),
        (["tracing.endpoint=http://h:4318/v1/traces"], "must be host:port for protocol grpc"),
        (["tracing.endpoint=h:4317", "tracing.protocol=http"], "must be a URL for protocol http"),
        (["tracing.endpoint=h:4317", "tracing.sample_ratio=2"], "tracing.sample_ratio"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, what):
    with pytest.raises(ConfigError, match=what):
        load_config(None, settings)
