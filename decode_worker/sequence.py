"""One request at a decode worker: its blocks, its tokens, and when what happened."""

import logging
from dataclasses import dataclass, field, replace

from core.errors import TwophaseError
from core.events.chunks import Chunks
from core.events.event import Event, EventKind
from core.events.step import StepFacts
from core.request import FinishReason, Logprobs, Request, WorkerName
from core.timeline import DecodeReport, PrefillReport
from core.worker import BlockHolder, DecodeDone, PromptLogprobs, RemoteReservation, WorkerInfo
from decode_worker.pace import Pace
from decode_worker.recording import BarePace
from engine.batch import SequenceStep
from engine.block_pool import Reservation
from engine.sampling.logits import history_of
from kv_transfer.plan import Reservation as InboundReservation

_log = logging.getLogger("twophase.decode_worker")


@dataclass(slots=True)
class Sequence:
    """State of one request, from its Reserve command to its last token.

    Invariants: it holds `reservation` from the grant until the worker gives it back;
    num_computed_tokens tokens have their KV in its blocks; once it runs, exactly the last token
    has not. From hold_at tokens on it makes no further one. is_shipped: a handoff reads its blocks.
    """

    session_id: str
    request: Request
    is_local: bool
    received_s: float
    reservation: Reservation | None = None
    granted_s: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    chunks: Chunks = field(default_factory=Chunks)
    ready_s: float | None = None
    pace: Pace | BarePace | None = None
    is_ended: bool = False
    hold_at: int | None = None
    is_shipped: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self.request.prompt_token_ids, *self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """How many those are."""
        return self.request.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_remaining_prompt_tokens(self) -> int:
        """Prompt tokens that are still to be read here."""
        return max(self.request.num_prompt_tokens - self.num_computed_tokens, 0)

    @property
    def cacheable_token_ids(self) -> tuple[int, ...]:
        """Prompt tokens whose KV may come from the prefix cache."""
        request = self.request
        return request.cacheable_token_ids if self.is_local else request.prompt_token_ids

    @property
    def is_running(self) -> bool:
        """The prompt's KV cache is complete; each step gives one token."""
        return self.ready_s is not None

    @property
    def is_held(self) -> bool:
        """It runs no further here: another worker is to go on with it."""
        return self.hold_at is not None and self.num_tokens >= self.hold_at

    def may_ship(self, request: Request) -> bool:
        """Whether its KV cache may become that of `request`'s prompt at another worker."""
        is_free = self.is_held and not self.is_shipped
        return is_free and self.token_ids == request.prompt_token_ids

    @property
    def is_decoding(self) -> bool:
        """Each step gives its next token."""
        return self.is_running and not self.is_held

    @property
    def is_runnable(self) -> bool:
        """Its next step waits for the device alone."""
        is_read_here = self.is_local and self.reservation is not None and not self.is_running
        return self.is_decoding or is_read_here

    @property
    def epoch(self) -> int:
        """Epoch of its blocks; 0 while it has none."""
        return self.reservation.epoch if self.reservation is not None else 0

    @property
    def state(self) -> str:
        """One word, as in BlockHolder."""
        if self.reservation is None:
            return "waiting"
        if self.is_shipped:
            return "pushing"
        if self.is_running:
            return "running"
        if self.is_local:
            return "computing"
        return "quarantined" if self.is_ended else "receiving"

    def holder(self, worker: WorkerName, now_s: float) -> BlockHolder:
        """What it holds, for the audit."""
        num_blocks = 0
        if self.reservation is not None:
            # Shared blocks of a handoff that failed are given back; only fresh ones are fenced.
            is_fenced = self.is_ended and not self.is_shipped
            held = self.reservation.fresh_block_ids if is_fenced else self.reservation.block_ids
            num_blocks = len(held)
        return BlockHolder(
            worker=worker,
            request_id=self.request.request_id,
            state=self.state,
            num_blocks=num_blocks,
            epoch=self.epoch,
            age_s=now_s - (self.granted_s or self.received_s),
        )

    def remote(self, info: WorkerInfo, address: str) -> RemoteReservation:
        """Its blocks as a prefill worker needs to know them."""
        assert self.reservation is not None
        num_blocks = info.layout.num_blocks(self.request.num_prompt_tokens)
        return RemoteReservation(
            decode_worker=info.name,
            decode_address=address,
            decode_incarnation=info.incarnation,
            epoch=self.reservation.epoch,
            block_ids=self.reservation.block_ids[:num_blocks],
            num_shared_blocks=self.reservation.num_shared,
            num_shared_tokens=self.reservation.num_shared * info.layout.block_size,
            prompt_digest=self.request.prompt_digest,
        )

    def inbound(self, remote: RemoteReservation) -> InboundReservation:
        """Its blocks as the handoff that is to fill them needs to know them."""
        return InboundReservation(
            request_id=self.request.request_id,
            epoch=remote.epoch,
            block_ids=remote.block_ids,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_cached_blocks=remote.num_shared_blocks,
        )

    def step(self, num_tokens: int) -> SequenceStep:
        """Its share of a forward pass: the next `num_tokens` tokens without KV."""
        assert self.reservation is not None
        start = self.num_computed_tokens
        end = start + num_tokens
        token_ids = (
            self.output_token_ids[-1:]
            if self.is_running
            else self.request.prompt_token_ids[start:end]
        )
        is_sampled = end >= self.request.num_prompt_tokens
        return SequenceStep(
            token_ids=token_ids,
            start=start,
            block_table=self.reservation.block_ids,
            sampling=self.request.sampling if is_sampled else None,
            history=history_of(self.request, self.output_token_ids) if is_sampled else None,
            targets=() if self.is_running else self.request.targets(start, end),
            num_top=self.request.sampling.num_prompt_logprobs or 0,
        )

    def scored(self, logprobs: tuple[Logprobs, ...]) -> PromptLogprobs:
        """What its router is told of the prompt tokens that a step has read."""
        return PromptLogprobs(self.request.request_id, logprobs)

    def computed(self, num_tokens: int, step: StepFacts) -> None:
        """The step that ended now had `num_tokens` of its tokens."""
        self.num_computed_tokens += num_tokens
        if not self.is_running:
            self.chunks.add(num_tokens, len(step.prompts), step.step_s, step.ended_s)

    def try_begin_decode(self, started_s: float, pace: type[Pace] | type[BarePace]) -> float | None:
        """How long it waited for a slot if its first decode step began then; None for others."""
        if self.ready_s is None or self.pace is not None:
            return None
        self.pace = pace(started_s)
        return started_s - self.ready_s

    def done(self, finish_reason: FinishReason) -> DecodeDone:
        """What its router is told with its last token; called once, and logged."""
        report = self.decode_report()
        _log.info(
            "request %s: %s after token %d, decoded for %.3f s",
            self.request.log_name,
            finish_reason,
            len(self.output_token_ids) - 1,
            report.decode_s,
        )
        return DecodeDone(finish_reason, report)

    def log_failed(self, error: TwophaseError) -> None:
        """Say why it did not."""
        _log.info("request %s: %s", self.request.log_name, error)

    def prefill_report(self, now_s: float) -> PrefillReport:
        """What was measured of a prompt that was read here and is done at `now_s`."""
        return self.chunks.report(self.granted_s, self.num_cached_tokens, now_s)

    def decode_report(self) -> DecodeReport:
        """What was measured of an answer until its last token."""
        if self.ready_s is None or self.pace is None:
            return DecodeReport(0.0, 0.0)
        report = self.pace.report(slot_wait_s=self.pace.began_s - self.ready_s)
        sealed = Event(EventKind.SEALED, self.ready_s, self.ready_s)
        slot_wait = Event(EventKind.SLOT_WAIT, self.ready_s, self.pace.began_s)
        return replace(report, events=(sealed, slot_wait, *report.events))


def step_facts(shares: list[tuple[Sequence, int]], now_s: float, step_s: float) -> StepFacts:
    """What a step that ended now was made of.

    Contract: called before the sequences are told of the tokens that it made.
    """
    decoding = [sequence for sequence, _ in shares if sequence.is_running]
    return StepFacts(
        ended_s=now_s,
        step_s=step_s,
        num_sequences=len(decoding),
        num_history_tokens=sum(sequence.num_computed_tokens for sequence in decoding),
        prompts=tuple(
            (sequence.request.request_id, num_tokens)
            for sequence, num_tokens in shares
            if not sequence.is_running
        ),
    )
