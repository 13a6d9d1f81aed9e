"""What the Grafana board shows: rows in the order of the questions that people ask.

`make docs` writes twophase.json from it. What workers and links count is told by each router:
`_once` takes it of one.
"""

from deploy.grafana.panel import Panel, Query, Row

_LINK = "{{prefill}} to {{decode}}"


def _rate(metric: str, where: str = "") -> str:
    return f"rate(twophase_{metric}{where}[$__rate_interval])"


def _sum(metric: str, by: str = "") -> str:
    """A second of what routers count, over all of them."""
    return f"sum by ({by}) ({_rate(metric)})"


def _once(expr: str) -> str:
    return f"max without (instance) ({expr})"


def _quantile(share: float, buckets: str, *labels: str) -> str:
    return f"histogram_quantile({share}, sum by ({', '.join(('le', *labels))}) ({buckets}))"


def _p95(histogram: str, *labels: str, where: str = "") -> str:
    """Of what routers measure."""
    return _quantile(0.95, _rate(f"{histogram}_bucket", where), *labels)


def _worker_p95(histogram: str, *labels: str) -> str:
    """Of what workers count."""
    return _quantile(0.95, _once(_rate(f"{histogram}_bucket")), *labels)


def _quantiles(title: str, histogram: str) -> Panel:
    buckets = _rate(f"{histogram}_bucket")
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return Panel(title, tuple(Query(_quantile(q, buckets), p) for p, q in shares.items()), "s")


def _one(title: str, expr: str, legend: str = "", unit: str = "short", note: str = "") -> Panel:
    return Panel(title, (Query(expr, legend),), unit, note)


def _stack(title: str, expr: str, legend: str, unit: str = "short", note: str = "") -> Panel:
    return Panel(title, (Query(expr, legend),), unit, note, is_stacked=True)


_FIRST = '{phase=~"tokenize|place|recovery|reserve|queue|prefill"}'
_PHASES = (
    f"{_sum('phase_seconds_sum', 'phase')} / on () group_left () {_sum('request_seconds_count')}"
)
_BUSY = _once(f"sum without (kind) ({_rate('step_seconds_sum')})")
# A step's share of time knows its worker, the count of steps also the pool.
_POOL_BUSY = (
    f"avg by (pool) ({_BUSY} * on (worker) group_left (pool) "
    f"(0 * {_once('twophase_worker_steps_total')} + 1))"
)
_KV_READ = f"{_rate('decode_step_kv_read_bytes_sum')} / {_rate('decode_step_kv_read_bytes_count')}"
_TAKEN = 'twophase_kv_blocks{state=~"used|quarantined"}'
_KV_USED = (
    f"sum without (state) ({_once(_TAKEN)}) / sum without (state) ({_once('twophase_kv_blocks')})"
)
_READY = _once('sum without (state) (twophase_workers{state="ready"})')

_IS_IT_UP = Row(
    "Is it up?",
    (
        Panel("Ready", (Query("min(twophase_ready)"),), note="1: tokens can flow.", is_stat=True),
        _one("Workers", _once("twophase_workers"), "{{pool}} {{state}}"),
        _one("Given up, not replaced", _once("twophase_stuck_workers"), "workers"),
        Panel(
            "Answers",
            (
                Query("sum(twophase_requests_running)", "running"),
                Query("sum(twophase_requests_waiting)", "waiting for workers"),
            ),
            is_stacked=True,
        ),
    ),
)
_PHASE = Row(
    "Which phase is slow?",
    (
        _stack(
            "Where an answer's time goes",
            _PHASES,
            "{{phase}}",
            "s",
            "Mean seconds of each phase; together the whole answer.",
        ),
        _quantiles("Time to first token", "time_to_first_token_seconds"),
        _one(
            "Parts of the first token, p95",
            _p95("phase_seconds", "phase", where=_FIRST),
            "{{phase}}",
            "s",
            "A late first token does not prove that prefill is slow: see the others.",
        ),
        _one(
            "Prefill by input length, p95",
            _p95("prefill_seconds", "input_length"),
            "to {{input_length}} tokens",
            "s",
        ),
    ),
)
_STREAMS = Row(
    "Do streams stutter?",
    (
        _quantiles("Inter-token latency", "inter_token_latency_seconds"),
        _one(
            "Utilisation",
            _BUSY,
            "{{worker}}",
            "percentunit",
            "Time in steps. High utilisation says nothing of streams: see their latency.",
        ),
        _one(
            "Scheduler iterations by kind",
            _once(_rate("step_seconds_count")),
            "{{worker}} {{kind}}",
            "ops",
            "Prefill or mixed steps at a decode worker hold up its streams.",
        ),
        _one(
            "Decode step by batch, p95",
            _worker_p95("decode_step_seconds", "batch"),
            "to {{batch}} sequences",
            "s",
        ),
        _one(
            "Decode step by history, p95",
            _worker_p95("decode_step_seconds", "history"),
            "to {{history}} tokens",
            "s",
        ),
        _one("KV cache read by a step, mean", _once(_KV_READ), "{{worker}}", "bytes"),
    ),
)
_TOKENS = Row(
    "Prompt tokens and output tokens: two paths",
    (
        _one("Prompt tokens", _sum("prompt_tokens_total"), unit="ops"),
        _one("Output tokens", _sum("output_tokens_total"), unit="ops"),
        _one(
            "Prompt tokens computed",
            _once(_rate("worker_prompt_tokens_total")),
            "{{worker}} ({{pool}})",
            "ops",
        ),
        _stack(
            "Where decode's KV cache came from",
            _sum("decode_kv_tokens_total", "source"),
            "{{source}}",
            "ops",
        ),
    ),
)
_TRANSFER = Row(
    "Is time spent on moving state?",
    (
        _one("KV moved", _once(_rate("link_bytes_total")), _LINK, "Bps"),
        _one(
            "What links carry while busy",
            _once("twophase_link_bandwidth_bytes_per_second"),
            _LINK + " ({{backend}})",
            "Bps",
            "Measured at the pieces that were sent: the ceiling of what is moved.",
        ),
        _one(
            "Decode waits for it, p95",
            _worker_p95("link_wait_seconds", "prefill", "decode"),
            _LINK,
            "s",
            "What is not hidden behind compute.",
        ),
        _one(
            "Handoff, p95",
            _worker_p95("link_transfer_seconds", "prefill", "decode"),
            _LINK,
            "s",
        ),
        _one(
            "Computed, and not at decode yet",
            _once("twophase_kv_in_flight_bytes"),
            "{{worker}}",
            "bytes",
        ),
        _one("Round trip of a piece", _once("twophase_link_round_trip_seconds"), _LINK, "s"),
        _one("Handoffs", _sum("handoffs_total", "outcome"), "{{outcome}}", "ops"),
        _one(
            "Failed attempts by pair and reason",
            _sum("attempt_failures_total", "prefill, decode, reason"),
            _LINK + ": {{reason}}",
            "ops",
        ),
    ),
)
_QUEUES = Row(
    "Where do requests wait?",
    (
        _one("Queue waits, p95", _p95("queue_wait_seconds", "phase"), "{{phase}}", "s"),
        _one("Requests at workers", _once("twophase_worker_requests"), "{{worker}} {{state}}"),
        Panel(
            "Waits longest now",
            (
                Query(_once("twophase_worker_oldest_wait_seconds"), "{{worker}}"),
                Query("max(twophase_line_oldest_wait_seconds)", "the router's line"),
            ),
            "s",
        ),
    ),
)
_KV = Row(
    "Is there room for KV?",
    (
        _stack("Blocks", _once("twophase_kv_blocks"), "{{worker}} {{state}}"),
        _one("Used share", _KV_USED, "{{worker}}", "percentunit"),
        _one("Oldest in quarantine", _once("twophase_quarantine_age_seconds"), "{{worker}}", "s"),
    ),
)
_SCALING = Row(
    "Do pools fit the load?",
    (
        _one("Ready workers", _READY, "{{pool}}"),
        _one("Mean utilisation of a pool", _POOL_BUSY, "{{pool}}", "percentunit"),
        _one(
            "Loading the model",
            _once("twophase_model_load_seconds"),
            "{{worker}}",
            "s",
            "Apart from all serving: what a new worker takes before it helps.",
        ),
    ),
)
_OUTCOMES = Row(
    "How do requests end?",
    (
        _stack("Outcomes", _sum("requests_total", "outcome"), "{{outcome}}", "ops"),
        _quantiles("Whole answers", "request_seconds"),
        _one("Went on elsewhere", _sum("failed_attempts_total"), "attempts", "ops"),
    ),
)

BOARD = (
    *(_IS_IT_UP, _PHASE, _STREAMS, _TOKENS, _TRANSFER),
    *(_QUEUES, _KV, _SCALING, _OUTCOMES),
)
