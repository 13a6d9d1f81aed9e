"""Every metric, in one table, and the registry of a process that holds their values.

Code refers to the entries of this table; docs/metrics.md is written from it. Two ways to a value:

measured    counters and histograms that code observes where something happens
looked up   facts that are read when somebody asks, so that none can be stale: a `Sample` each

Prometheus' own client underneath. Names are `twophase_<noun>_<unit>`; seconds and bytes are whole
units; nothing here knows HTTP.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0)
# Upper bounds of the label input_length, in tokens.
INPUT_LENGTHS = (128, 512, 2048, 8192, 32768)

# Untyped in the library.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Kind(StrEnum):
    """What a metric's values do: only grow, go up and down, or fall into buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric; its unit is the last word of its name, or none."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """What it counts or measures."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in ("seconds", "bytes", "tokens", "blocks") else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value that was looked up: of a gauge, or of a counter that something else keeps."""

    entry: Entry
    value: float
    labels: tuple[str, ...] = ()


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Entry:
    return Entry(f"twophase_{name}", Kind.HISTOGRAM, meaning, labels, buckets)


def _counter(name: str, meaning: str, *labels: str) -> Entry:
    return Entry(f"twophase_{name}_total", Kind.COUNTER, meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Entry:
    return Entry(f"twophase_{name}", Kind.GAUGE, meaning, labels)


TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "Request received, until its first token was handed to the transport; each answer.",
    LONG,
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    "From one hand-over of tokens to the transport to the next of the same answer.",
    SHORT,
)
REQUEST_DURATION = _histogram(
    "request_seconds", "Request received, until its answer's last message; each answer.", LONG
)
QUEUE_WAIT = _histogram(
    "queue_wait_seconds",
    "Waiting: at the router for workers (phase router), at the prefilling worker (prefill), with a "
    "KV cache that is sealed for a decode step (decode); each answer.",
    LONG,
    "phase",
)
PHASE = _histogram(
    "phase_seconds",
    "Each phase of an answer, as in its Completion; they add up to request_seconds, with what no "
    "phase covers as phase unaccounted.",
    LONG,
    "phase",
)
PREFILL = _histogram(
    "prefill_seconds",
    "Computing a prompt, by the most tokens that prompts of this length have; each answer.",
    LONG,
    "input_length",
)
KV_TRANSFER = _histogram(
    "kv_transfer_seconds", "A handoff: first byte sent, until sealed at decode.", LONG, "backend"
)
KV_TRANSFER_EXPOSED = _histogram(
    "kv_transfer_exposed_seconds",
    "The part of a handoff after the prompt was computed: what nothing hides.",
    LONG,
    "backend",
)
KV_TRANSFER_BYTES = _counter(
    "kv_transfer_bytes",
    "KV cache that decode acknowledged, of answers that ended well; a handoff that is tried again "
    "counts in the attempt that arrived.",
    "backend",
)
REQUESTS = _counter(
    "requests",
    "Requests that ended, by finish reason (of n answers that of the first) or by error.",
    "outcome",
)
PROMPT_TOKENS = _counter(
    "prompt_tokens", "Prompt tokens of requests that were given to workers; of n answers once."
)
OUTPUT_TOKENS = _counter("output_tokens", "Tokens of answers that were sent.")
FAILED_ATTEMPTS = _counter(
    "failed_attempts",
    "Attempts that a worker failed, and after which the answer went on elsewhere.",
)
KV_SOURCE = _counter(
    "decode_kv_tokens",
    "Prompt tokens by where decode's KV cache of them came from: transferred, cached at decode, or "
    "local, that is computed there.",
    "source",
)
HANDOFFS = _counter("handoffs", "KV caches that were to be moved: sealed, or failed.", "outcome")
MIGRATIONS = _counter(
    "migrations",
    "Running answers whose KV cache a decode worker that stops was to ship to another: sealed, or "
    "why not; those were read again.",
    "outcome",
)
MIGRATED_BYTES = _counter("migrated_bytes", "KV cache that arrived that way.")
LINK_BYTES = _counter(
    "link_bytes",
    "Bytes acknowledged over each link that is open; begins anew with a new link.",
    "prefill",
    "decode",
    "backend",
)
WORKER_STEPS = _counter("worker_steps", "Steps of a worker's engine.", "worker", "pool")
REQUESTS_RUNNING = _gauge("requests_running", "Answers that workers are at, or are being written.")
REQUESTS_WAITING = _gauge("requests_waiting", "Answers that wait at the router for workers.")
WORKERS = _gauge("workers", "Connected workers: ready, suspect or draining.", "pool", "state")
WORKER_REQUESTS = _gauge(
    "worker_requests", "Requests at a worker: waiting for blocks, or running.", "worker", "state"
)
KV_BLOCKS = _gauge(
    "kv_blocks",
    "Blocks of a worker's KV cache: free, cached (free, and findable by prefix), used, or "
    "quarantined; they add up to all.",
    "worker",
    "state",
)
READY = _gauge("ready", "1 when a token can flow through both pools, else 0.")

TABLE = (
    *(TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, REQUEST_DURATION, QUEUE_WAIT, PHASE, PREFILL),
    *(KV_TRANSFER, KV_TRANSFER_EXPOSED, KV_TRANSFER_BYTES),
    *(REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, FAILED_ATTEMPTS, KV_SOURCE, HANDOFFS),
    *(MIGRATIONS, MIGRATED_BYTES),
    *(REQUESTS_RUNNING, REQUESTS_WAITING, READY, WORKERS, WORKER_REQUESTS, WORKER_STEPS),
    *(KV_BLOCKS, LINK_BYTES),
)


class Telemetry:
    """The measured metrics of one process; one per process, thread-safe.

    Invariant: what is measured without labels is told from the start, as zero.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, entry: Entry) -> Counter:
        """The counter of this entry; called once for each."""
        assert entry in TABLE and entry.kind is Kind.COUNTER
        return Counter(entry.name, entry.meaning, entry.labels, registry=self._registry)

    def histogram(self, entry: Entry) -> Histogram:
        """The histogram of this entry; called once for each."""
        assert entry in TABLE and entry.kind is Kind.HISTOGRAM
        buckets = entry.buckets
        return Histogram(
            entry.name, entry.meaning, entry.labels, buckets=buckets, registry=self._registry
        )

    def exposition(self, samples: Iterable[Sample]) -> bytes:
        """Everything measured, and these facts, in Prometheus' text format."""
        both = CollectorRegistry(auto_describe=False)
        both.register(_Collected(lambda: [*self._registry.collect(), *_families(samples)]))
        return prometheus_client.generate_latest(both)


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    read: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.read()


def _families(samples: Iterable[Sample]) -> Iterator[Metric]:
    by_entry: dict[Entry, list[Sample]] = {}
    for sample in samples:
        by_entry.setdefault(sample.entry, []).append(sample)
    for entry, found in by_entry.items():
        kind = CounterMetricFamily if entry.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(entry.name, entry.meaning, labels=entry.labels)
        for sample in found:
            family.add_metric(sample.labels, sample.value)
        yield family


def input_length(num_tokens: int) -> str:
    """The value of the label input_length for a prompt of so many tokens."""
    return next((str(most) for most in INPUT_LENGTHS if num_tokens <= most), "inf")


def markdown() -> str:
    """The table as a Markdown table."""
    rows = ["| metric | kind | unit | labels | |", "|---|---|---|---|---|"]
    for entry in TABLE:
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        rows.append(
            f"| `{entry.name}` | {entry.kind} | {entry.unit} | {labels} | {entry.meaning} |"
        )
    return "\n".join(rows) + "\n"
