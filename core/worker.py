"""What router and workers say to each other, as values.

A router holds one session per decode worker: DecodeCommands one way, DecodeUpdates the other (one
per decode step). A prefill is one call that answers with a FirstToken, then a TransferReport.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import TwophaseError
from core.layout import KVLayout
from core.request import FinishReason, Logprobs, Request, RequestId, WorkerName
from core.signals import Signals
from core.telemetry import Sample
from core.timeline import DecodeReport, PrefillReport, TransferReport


class Role(StrEnum):
    """Which phase a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is; fixed while its incarnation lives.

    kernels says in words what computes attention and decode steps, and why.
    """

    name: WorkerName
    role: Role
    incarnation: str
    model: str
    layout: KVLayout
    num_blocks: int
    max_context_tokens: int
    vocab_size: int
    max_num_sequences: int
    kernels: str


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One KV link: its other end, its backend and why that one, bytes acknowledged.

    The sending side also tells the measured round trip of a small piece and the bytes that the
    link carries while it is busy; None until a piece was acknowledged.
    """

    peer: WorkerName
    backend: str
    reason: str
    num_bytes: int
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker holds right now; idle means `held` is all zero.

    num_runnable_requests: those whose next step waits for the device alone; while there are any,
    num_steps rises, or the worker is wedged. is_draining: it stops, and takes nothing new.
    quarantine_age_s: how long the oldest quarantined reservation waits for its writer to be fenced,
    0 without one. More than some seconds mean a peer that neither answers nor dies.
    samples: what the worker counted since it began, for /metrics.
    """

    name: WorkerName
    role: Role
    address: str
    pid: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int
    num_waiting_requests: int
    num_running_requests: int
    num_reservations: int
    num_open_transfers: int
    num_handler_tasks: int
    num_steps: int
    num_transfer_bytes: int
    num_waiting_prompt_tokens: int
    kernels: str = ""
    links: tuple[LinkStatus, ...] = ()
    quarantine_age_s: float = 0.0
    num_runnable_requests: int = 0
    is_draining: bool = False
    signals: Signals = Signals()
    samples: tuple[Sample, ...] = ()

    @property
    def held(self) -> dict[str, int]:
        """Every count that must be zero when no request is in the cluster."""
        return {
            "blocks": self.num_used_blocks,
            "quarantined blocks": self.num_quarantined_blocks,
            "waiting requests": self.num_waiting_requests,
            "running requests": self.num_running_requests,
            "reservations": self.num_reservations,
            "open transfers": self.num_open_transfers,
            "handler tasks": self.num_handler_tasks,
        }


@dataclass(frozen=True, slots=True)
class StuckWorker:
    """A worker that a router gave up although its process may live: it has to be replaced.

    age_s is the time since then; a worker that was started later is another one.
    """

    name: WorkerName
    address: str
    why: str
    age_s: float


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks of a worker that are not free, and for whom.

    state says in one word what they wait for: "waiting" holds none yet, "receiving" a KV cache,
    "computing" or "running" the device, "pushing" the other side, "quarantined" a writer that is
    not fenced. age_s is the time since the blocks were taken.
    """

    worker: WorkerName
    request_id: RequestId
    state: str
    num_blocks: int
    epoch: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KvTotals:
    """How decode's KV caches of finished requests came to be: prompt tokens, and handoffs.

    Migrations are those of running answers between decode workers; failed ones by reason, sorted.
    """

    num_transferred_tokens: int = 0
    num_decode_cached_tokens: int = 0
    num_local_prefill_tokens: int = 0
    num_sealed_handoffs: int = 0
    num_failed_handoffs: int = 0
    num_migrations: int = 0
    num_migrated_bytes: int = 0
    failed_migrations: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteReservation:
    """Blocks at a decode worker that wait for one request's KV cache.

    block_ids are those of the prompt, in order; the first num_shared_blocks, which hold
    num_shared_tokens, are already filled and must not be written. prompt_digest tells which prompt
    that is (Request.prompt_digest): the KV cache of another one must not be shipped there.
    """

    decode_worker: WorkerName
    decode_address: str
    decode_incarnation: str
    epoch: int
    block_ids: tuple[int, ...]
    num_shared_blocks: int
    num_shared_tokens: int
    prompt_digest: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed: the answer's first token, and how long it took."""

    token_id: int
    report: PrefillReport
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the next tokens of a request's prompt, from its second on; the first token comes after."""

    request_id: RequestId
    logprobs: tuple[Logprobs, ...]


PrefillEvent = PromptLogprobs | FirstToken | TransferReport


@dataclass(frozen=True, slots=True)
class Reserve:
    """Set blocks aside for `request`; if prefill_locally, also read its prompt here."""

    request: Request
    prefill_locally: bool


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Give up a request; nothing happens if it is not known (any more)."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Stop a request's answer where it is and keep its KV cache, until it is fetched or given up.

    Answered by Held, or by RequestFailed where there is no whole KV cache yet.
    """

    request_id: RequestId


DecodeCommand = Reserve | CancelRequest | HoldRequest


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are set aside."""

    request_id: RequestId
    reservation: RemoteReservation


@dataclass(frozen=True, slots=True)
class DecodeDone:
    """The token that carries this is the last."""

    finish_reason: FinishReason
    report: DecodeReport


@dataclass(frozen=True, slots=True)
class NewToken:
    """The index-th token of the answer, from 0."""

    request_id: RequestId
    token_id: int
    index: int
    done: DecodeDone | None = None
    prefill: PrefillReport | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The worker gave the request up and holds nothing of it."""

    request_id: RequestId
    error: TwophaseError


@dataclass(frozen=True, slots=True)
class Held:
    """No token of the request comes any more; all that were made were told."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DecodeUpdate:
    """What one step, or one change between steps, did for the requests of one router.

    is_draining: the worker stops; whoever can be served elsewhere should be.
    """

    reserved: tuple[Reserved, ...] = ()
    tokens: tuple[NewToken, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    is_draining: bool = False
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    held: tuple[Held, ...] = ()

    @property
    def events(self) -> tuple["Reserved | PromptLogprobs | NewToken | Held | RequestFailed", ...]:
        """What it tells of single requests, in the order in which it happened to each."""
        return (*self.reserved, *self.prompt_logprobs, *self.tokens, *self.held, *self.failed)


@dataclass(slots=True)
class UpdateBuilder:
    """Gathers what becomes one DecodeUpdate."""

    reserved: list[Reserved] = field(default_factory=list)
    tokens: list[NewToken] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def build(self) -> DecodeUpdate:
        """The gathered update."""
        return DecodeUpdate(
            tuple(self.reserved),
            tuple(self.tokens),
            tuple(self.failed),
            prompt_logprobs=tuple(self.prompt_logprobs),
            held=tuple(self.held),
        )
