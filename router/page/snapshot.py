"""Everything that the page shows, as one value: facts in, a Snapshot out.

Bounded whatever the cluster's size: of each list the page gets at most so many entries, and the
number of all. Holds ids, names, counts and seconds; no prompt and no answer.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.completion import Completion
from core.diagnosis import Usual, explain, spreads, troubles, usual_of
from core.finding import PhaseSpread, Trouble
from core.listing import ListedRequest, ListedWorker
from core.signals import Demand
from core.worker import KvTotals, LinkStatus, Role, StuckWorker, WorkerStatus
from router.page.span import Span, open_phase, spans_of, spans_so_far
from router.telemetry.decisions import Decision
from router.telemetry.history import Ended
from router.telemetry.recent import SLOT_S, Quantiles, Slot

MAX_WORKERS = 64
MAX_LINKS = 64
MAX_REQUESTS = 24
MAX_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class Judged:
    """What `diagnose` says of the requests that ended well within the last `window_s`."""

    window_s: float
    num_requests: int
    troubles: tuple[Trouble, ...]
    waits: tuple[PhaseSpread, ...]
    usual: Usual

    @classmethod
    def of(cls, completions: Sequence[Completion], window_s: float) -> "Judged":
        """The judgement; takes some 50 us for each of them."""
        return cls(
            window_s,
            len(completions),
            tuple(troubles(completions)),
            tuple(spreads(completions)),
            usual_of(completions),
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What the snapshot is made from; times are by the router's clock.

    workers: each with what it said last, None before it said anything. running: the oldest, each
    with what is known of it, None while its prompt is read; ended: the last. slots and lately: what
    was delivered, by slots and in the last seconds together.
    """

    now_s: float
    model: str
    mode: str
    is_ready: bool
    is_scaled: bool
    workers: Sequence[tuple[ListedWorker, WorkerStatus | None]]
    stuck: Sequence[StuckWorker]
    demand: Demand
    kv: KvTotals
    num_running: int
    running: Sequence[tuple[ListedRequest, Completion | None]]
    ended: Sequence[Ended]
    judged: Judged
    slots: Sequence[Slot]
    lately: Slot
    lately_s: float
    decisions: Sequence[Decision]


@dataclass(frozen=True, slots=True)
class Worker:
    """One connected worker; counts are None while it has said nothing."""

    name: str
    role: Role
    state: str
    address: str
    max_num_sequences: int
    num_waiting: int | None = None
    num_running: int | None = None
    num_steps: int | None = None
    blocks: "Blocks | None" = None
    queue_wait_p50_s: float | None = None
    queue_wait_p95_s: float | None = None
    prompt_tokens_per_s: float | None = None
    step_s: float | None = None
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A worker's KV blocks; cached ones are free, too. The parts add up to the total."""

    num_used: int
    num_quarantined: int
    num_cached: int
    num_free: int
    num_total: int
    quarantine_age_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """One KV link, as its sending end tells of it."""

    sender: str
    receiver: str
    backend: str
    reason: str
    num_bytes: int
    bytes_per_s: float | None
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class Running:
    """One request that is inside: the phase that it is in, and where its time went so far."""

    request_id: str
    phase: str
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefill_worker: str
    decode_worker: str
    num_attempts: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Past:
    """One request that ended; slow names the phases that `explain` names."""

    request_id: str
    age_s: float
    finish_reason: str
    total_s: float
    ttft_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefill_worker: str
    decode_worker: str
    slow: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of a wait in seconds, lately and by slots; None where nothing was measured."""

    lately: Quantiles
    p50_s: tuple[float | None, ...]
    p95_s: tuple[float | None, ...]
    p99_s: tuple[float | None, ...]

    @classmethod
    def of(cls, lately: Quantiles, slots: Sequence[Quantiles]) -> "Latency":
        """The same, by columns."""
        columns = [(slot.p50_s, slot.p95_s, slot.p99_s) for slot in slots]
        return cls(lately, *zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class Rates:
    """Prompt tokens and output tokens apart, a second lately and in each slot, oldest first."""

    slot_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: tuple[int, ...]
    num_output_tokens: tuple[int, ...]
    ttft: Latency
    itl: Latency


@dataclass(frozen=True, slots=True)
class Scaling:
    """What was decided about the pools, the last decision first, each with its age in seconds."""

    is_configured: bool
    decisions: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The page at one moment."""

    model: str
    mode: str
    is_ready: bool
    demand: Demand
    kv: KvTotals
    num_workers: int
    workers: tuple[Worker, ...]
    stuck: tuple[StuckWorker, ...]
    num_links: int
    links: tuple[Link, ...]
    rates: Rates
    num_running: int
    running: tuple[Running, ...]
    ended: tuple[Past, ...]
    judged: Judged
    scaling: Scaling


def snapshot_of(facts: Facts) -> Snapshot:
    """What the page shows of these facts."""
    links = _links(facts)
    workers = sorted(facts.workers, key=lambda pair: (pair[0].role is Role.DECODE, pair[0].name))
    return Snapshot(
        model=facts.model,
        mode=facts.mode,
        is_ready=facts.is_ready,
        demand=facts.demand,
        kv=facts.kv,
        num_workers=len(workers),
        workers=tuple(_worker(*pair) for pair in workers[:MAX_WORKERS]),
        stuck=tuple(facts.stuck[:MAX_WORKERS]),
        num_links=len(links),
        links=tuple(links[:MAX_LINKS]),
        rates=_rates(facts),
        num_running=facts.num_running,
        running=tuple(_running(*pair) for pair in facts.running[:MAX_REQUESTS]),
        ended=tuple(_past(ended, facts) for ended in facts.ended[:MAX_REQUESTS]),
        judged=facts.judged,
        scaling=Scaling(
            facts.is_scaled,
            tuple((facts.now_s - d.heard_s, d.sentence) for d in facts.decisions[:MAX_DECISIONS]),
        ),
    )


def _rates(facts: Facts) -> Rates:
    slots, lately = facts.slots, facts.lately
    return Rates(
        slot_s=SLOT_S,
        prompt_tokens_per_s=lately.num_prompt_tokens / facts.lately_s,
        output_tokens_per_s=lately.num_output_tokens / facts.lately_s,
        num_prompt_tokens=tuple(slot.num_prompt_tokens for slot in slots),
        num_output_tokens=tuple(slot.num_output_tokens for slot in slots),
        ttft=Latency.of(lately.ttft, [slot.ttft for slot in slots]),
        itl=Latency.of(lately.itl, [slot.itl for slot in slots]),
    )


def _worker(listed: ListedWorker, status: WorkerStatus | None) -> Worker:
    known = (listed.name, listed.role, listed.state, listed.address, listed.max_num_sequences)
    if status is None:
        return Worker(*known)
    signals = status.signals
    return Worker(
        *known,
        num_waiting=status.num_waiting_requests,
        num_running=status.num_running_requests,
        num_steps=status.num_steps,
        blocks=Blocks(
            num_used=status.num_used_blocks,
            num_quarantined=status.num_quarantined_blocks,
            num_cached=status.num_cached_blocks,
            num_free=status.num_free_blocks - status.num_cached_blocks,
            num_total=status.num_total_blocks,
            quarantine_age_s=status.quarantine_age_s,
        ),
        queue_wait_p50_s=signals.queue_wait_p50_s,
        queue_wait_p95_s=signals.queue_wait_p95_s,
        prompt_tokens_per_s=signals.tokens_per_s,
        step_s=signals.step_s,
        kernels=status.kernels,
    )


def _links(facts: Facts) -> list[Link]:
    """Both ends tell of a link; the sending one has measured it.

    Decode workers send, too, when they stop and hand running answers over.
    """
    return [
        _link(status.name, link)
        for _, status in facts.workers
        if status is not None
        for link in status.links
        if status.role is Role.PREFILL or link.latency_s is not None
    ]


def _link(sender: str, link: LinkStatus) -> Link:
    return Link(
        sender,
        link.peer,
        link.backend,
        link.reason,
        link.num_bytes,
        link.bytes_per_s,
        link.latency_s,
    )


def _running(listed: ListedRequest, known: Completion | None) -> Running:
    phase = open_phase(known, listed.state)
    spans = ((phase, listed.age_s),) if known is None else spans_so_far(known, listed.state)
    return Running(
        request_id=listed.request_id,
        phase=phase,
        age_s=listed.age_s,
        num_prompt_tokens=listed.num_prompt_tokens,
        num_output_tokens=listed.num_output_tokens,
        prefill_worker=listed.prefill_worker,
        decode_worker=listed.decode_worker,
        num_attempts=listed.num_attempts,
        spans=spans,
    )


def _past(ended: Ended, facts: Facts) -> Past:
    completion = ended.completion
    return Past(
        request_id=completion.request_id,
        age_s=facts.now_s - ended.ended_s,
        finish_reason=completion.finish_reason,
        total_s=completion.phases.total_s,
        ttft_s=completion.phases.time_to_first_token_s,
        num_prompt_tokens=completion.usage.num_prompt_tokens,
        num_output_tokens=completion.usage.num_output_tokens,
        prefill_worker=completion.prefill_worker,
        decode_worker=completion.decode_worker,
        slow=tuple(finding.phase for finding in explain(completion, facts.judged.usual)),
        spans=spans_of(completion.phases),
    )
