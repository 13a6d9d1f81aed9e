"""Every metric, in one table, and what a value of one is.

Code refers to the entries of this table; docs/metrics.md is written from it. Three ways to a value:

measured    counters and histograms that the router observes where something happens
counted     the same of a worker, which speaks no HTTP: a `core.tally.Tally` that goes with its
            heartbeat to the router
looked up   facts that are read when somebody asks, so that none can be stale

The last two are a `Sample` each. Names are `twophase_<noun>_<unit>`; seconds and bytes are whole
units; nothing here knows Prometheus' client or HTTP.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0)
MEBIBYTES = tuple(float(4**power << 20) for power in range(9))
# Upper bounds of the labels input_length, batch (sequences) and history (tokens), for all workers
# alike: each label has a value more.
INPUT_LENGTHS = (128, 512, 2048, 8192, 32768)
BATCHES = (1, 4, 16, 64)
HISTORIES = (1024, 8192, 65536)


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
        if self.name.endswith("_bytes_per_second"):
            return "bytes/s"
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in ("seconds", "bytes", "tokens", "blocks") else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of one metric that was looked up, or that a worker counted.

    Of a histogram value is the sum, and counts how many fell into each of its buckets, the last
    above all bounds.
    """

    entry: Entry
    value: float
    labels: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


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
ATTEMPT_FAILURES = _counter(
    "attempt_failures",
    "Attempts that workers failed, whatever came after, by the pair that served and the reason: "
    "that of the transfer where a KV cache did not arrive (checksum, link_lost, ...), else the "
    "error. prefill is empty where decode reads the prompt.",
    *("prefill", "decode", "reason"),
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
_LINK = ("prefill", "decode", "backend")
LINK_BYTES = _counter(
    "link_bytes",
    "Bytes of handoffs that were sealed over a link, since its sender began.",
    *_LINK,
)
LINK_TRANSFER = _histogram(
    "link_transfer_seconds", "A handoff over a link: first byte sent, until sealed.", LONG, *_LINK
)
LINK_WAIT = _histogram(
    "link_wait_seconds", "The part of it after the prompt was computed: decode waits.", LONG, *_LINK
)
LINK_BANDWIDTH = _gauge(
    "link_bandwidth_bytes_per_second",
    "What an open link carries while it is busy; absent until it carried anything.",
    *_LINK,
)
LINK_ROUND_TRIP = _gauge(
    "link_round_trip_seconds", "Shortest recent round trip of a piece over an open link.", *_LINK
)
WORKER_STEPS = _counter("worker_steps", "Steps of a worker's engine.", "worker", "pool")
STEP = _histogram(
    "step_seconds",
    "Steps of a worker's scheduler that computed, by kind: prefill, decode, or mixed, that is both "
    "in one. Its count is that of the iterations.",
    SHORT,
    *("worker", "kind"),
)
DECODE_STEP = _histogram(
    "decode_step_seconds",
    "Steps of kind decode, by the most sequences, and the most tokens of history that they read, "
    "of steps of this size.",
    SHORT,
    *("worker", "batch", "history"),
)
DECODE_KV_READ = _histogram(
    "decode_step_kv_read_bytes",
    "KV cache that a step with decoding sequences reads, all ranks together.",
    MEBIBYTES,
    "worker",
)
WORKER_PROMPT_TOKENS = _counter(
    "worker_prompt_tokens", "Prompt tokens that a worker's steps computed.", "worker", "pool"
)
WORKER_OUTPUT_TOKENS = _counter(
    "worker_output_tokens",
    "Tokens that a decode worker's steps added to answers; an answer's first is not among them.",
    "worker",
)
MODEL_LOAD = _gauge(
    "model_load_seconds", "From a worker's start until its engine was loaded and warm.", "worker"
)
WORKER_OLDEST_WAIT = _gauge(
    "worker_oldest_wait_seconds",
    "How long the request has waited that waits longest at a worker: for its first step (prefill), "
    "or for blocks (decode).",
    "worker",
)
KV_IN_FLIGHT = _gauge(
    "kv_in_flight_bytes",
    "KV cache that a worker computed and decode has not.",
    "worker",
)
QUARANTINE_AGE = _gauge(
    "quarantine_age_seconds",
    "How long the oldest quarantined blocks of a worker wait for their writer; 0 without any.",
    "worker",
)
OLDEST_IN_LINE = _gauge(
    "line_oldest_wait_seconds", "How long the first in the router's line has waited for workers."
)
STUCK_WORKERS = _gauge(
    "stuck_workers", "Workers that were given up although their process may live: to be replaced."
)
REQUESTS_RUNNING = _gauge("requests_running", "Answers that workers are at, or are being written.")
REQUESTS_WAITING = _gauge("requests_waiting", "Answers that wait at the router for workers.")
WORKERS = _gauge(
    "workers", "Connected workers: ready, warming, suspect or draining.", "pool", "state"
)
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
TRACE_SPANS = _counter(
    "trace_spans",
    "Spans that were made for the collector, where tracing is on: exported, failed (the collector "
    "did not take them), or dropped (too many waited for it).",
    "outcome",
)
READY = _gauge("ready", "1 when a token can flow through both pools, else 0.")

TABLE = (
    *(TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, REQUEST_DURATION, QUEUE_WAIT, PHASE, PREFILL),
    *(KV_TRANSFER, KV_TRANSFER_EXPOSED, KV_TRANSFER_BYTES),
    *(REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, FAILED_ATTEMPTS, ATTEMPT_FAILURES),
    *(KV_SOURCE, HANDOFFS, MIGRATIONS, MIGRATED_BYTES),
    *(REQUESTS_RUNNING, REQUESTS_WAITING, OLDEST_IN_LINE, READY, WORKERS, STUCK_WORKERS),
    *(WORKER_REQUESTS, WORKER_OLDEST_WAIT, KV_BLOCKS, QUARANTINE_AGE, KV_IN_FLIGHT, MODEL_LOAD),
    *(WORKER_STEPS, STEP, DECODE_STEP, DECODE_KV_READ, WORKER_PROMPT_TOKENS, WORKER_OUTPUT_TOKENS),
    *(LINK_BYTES, LINK_TRANSFER, LINK_WAIT, LINK_BANDWIDTH, LINK_ROUND_TRIP, TRACE_SPANS),
)


def input_length(num_tokens: int) -> str:
    """The value of the label input_length for a prompt of so many tokens."""
    return size_label(INPUT_LENGTHS, bisect_left(INPUT_LENGTHS, num_tokens))


def size_label(bounds: tuple[int, ...], place: int) -> str:
    """The value of a label for sizes: the bound at this place, inf above all."""
    return str(bounds[place]) if place < len(bounds) else "inf"


def markdown() -> str:
    """The table as a Markdown table."""
    rows = ["| metric | kind | unit | labels | |", "|---|---|---|---|---|"]
    for entry in TABLE:
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        rows.append(
            f"| `{entry.name}` | {entry.kind} | {entry.unit} | {labels} | {entry.meaning} |"
        )
    return "\n".join(rows) + "\n"
