"""One answer as it grows: the emitted-token log, the reports, and where the time went.

Tokens come on two streams (the first from prefill, the others from decode), so one may overtake
another: the log holds what may be delivered, `_early` what waits for its turn. Each token enters
the log once. When a worker fails, the next attempt gets prompt and log, and counts its tokens from
there; what waited in `_early` is computed again. An answer that its client resumes begins with what
the client has.

Pure: facts and times in, what to deliver out.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from core.completion import Completion
from core.errors import InvariantBroken, PeerStopping, TwophaseError
from core.request import (
    FinishReason,
    Logprobs,
    OutputToken,
    Request,
    Usage,
    WorkerName,
    id_of_attempt,
)
from core.request_state import Progress, RequestState
from core.timeline import DecodeReport, PrefillReport, TransferReport
from core.worker import (
    FirstToken,
    Held,
    NewToken,
    PromptLogprobs,
    RemoteReservation,
    RequestFailed,
    Reserved,
)
from router.placing.placement import Placement
from router.placing.recovery import Failure
from router.timeline.record import Record


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The call to the prefill worker ended before its last event."""

    error: TwophaseError


Event = (
    Reserved
    | PromptLogprobs
    | FirstToken
    | TransferReport
    | NewToken
    | Held
    | RequestFailed
    | PrefillFailed
)

Report = TypeVar("Report", PrefillReport, TransferReport, DecodeReport)


class Answer:
    """What is known of one request's answer.

    Invariants: the log only grows; a token is delivered once; reports are those of the last
    attempt; `completion` is called once, when `is_complete`. prompt_holder is the incarnation of
    the decode worker that had the prompt's KV cache last, empty until one has.
    """

    def __init__(
        self, request: Request, received_s: float, tokenize_s: float, *, index: int = 0
    ) -> None:
        """The index-th of n answers; `prompt_holder` may be set before the first attempt."""
        has = () if request.resumption is None else request.resumption.token_ids
        self.log: list[int] = list(has)
        self.request = request
        self.index = index
        self.prompt_holder = ""
        self.placement: Placement | None = None
        self.num_attempts = 0
        self._undelivered: list[OutputToken] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._progress = Progress()
        self._early: dict[int, OutputToken] = {}
        self._is_stopped = False
        self._num_resumed_tokens = 0
        self._is_prefill_lost = False
        self._finish_reason = request.finish_reason(has[-1], len(has)) if has else None
        self._reservation: RemoteReservation | None = None
        self._prefill: PrefillReport | None = None
        self._transfer: TransferReport | None = None
        self._decode: DecodeReport | None = None
        self.record = Record(received_s, tokenize_s)

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self._progress.state

    @property
    def _is_moved(self) -> bool:
        return self.placement is not None and self.placement.prefill is not None

    @property
    def is_complete(self) -> bool:
        """Every token was delivered, and every report that will come is here."""
        if self._finish_reason is None or self._undelivered:
            return False
        if self._is_stopped or self.num_attempts == 0:
            return True
        is_report_due = self._is_decoded_from_moved_kv and not self._is_prefill_lost
        return self._prefill is not None and not (is_report_due and self._transfer is None)

    @property
    def _num_new_tokens(self) -> int:
        """Tokens of the log that this attempt made."""
        return len(self.log) - self._num_resumed_tokens

    @property
    def _is_decoded_from_moved_kv(self) -> bool:
        return self._is_moved and self._num_new_tokens > 1

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens that the client has, less what `stop` dropped; a resumption's are among them."""
        return len(self.log) - len(self._undelivered)

    @property
    def num_sent_tokens(self) -> int:
        """Those that this router sent."""
        resumption = self.request.resumption
        return self.num_delivered_tokens - (len(resumption.token_ids) if resumption else 0)

    def attempt(self, placement: Placement, now_s: float) -> Request:
        """Workers were chosen; the request that they are to serve."""
        if self.num_attempts == 0:
            self._progress.move(RequestState.ADMITTED)
        self._progress.move(RequestState.RESERVING)
        self.num_attempts += 1
        self._num_resumed_tokens = len(self.log)
        self._early.clear()
        self._prompt_logprobs.clear()
        self.placement = placement
        self._reservation = self._prefill = self._transfer = self._decode = None
        self._is_prefill_lost = False
        self.record.placed(now_s, placement.why)
        return self.request.resumed(self.log, self.num_attempts)

    def take(self, event: Event, arrived_s: float) -> Failure | None:
        """Note what a worker said; returns why this attempt is over, None if it is not."""
        match event:
            case Reserved():
                self._progress.move(RequestState.PREFILLING)
                self._reservation = event.reservation
                self.record.reserved(arrived_s)
            case PromptLogprobs():
                self._prompt_logprobs += event.logprobs
            case FirstToken():
                self._prefill = self._heard(event.report)
                if self._progress.state is RequestState.PREFILLING:
                    self._progress.move(RequestState.TRANSFERRING)
                self._take_token(0, OutputToken(event.token_id, event.logprobs), arrived_s)
            case TransferReport():
                self._transfer = self._heard(event)
            case NewToken():
                self._take_decoded(event, arrived_s)
            case PrefillFailed():
                # Tokens of decode prove that the KV cache arrived: nothing is needed of prefill.
                self._is_prefill_lost = True
                if not self._is_decoded_from_moved_kv:
                    return self._failure(event.error, is_from_prefill=True)
            case RequestFailed() | Held():
                self._is_prefill_lost = True
                stops = PeerStopping(self.workers[1])
                error = event.error if isinstance(event, RequestFailed) else stops
                return self._failure(error, is_from_prefill=False)
        return None

    def _failure(self, error: TwophaseError, *, is_from_prefill: bool) -> Failure | None:
        """None when the last token is here already: no worker can fail the answer any more."""
        return None if self._finish_reason is not None else Failure(error, is_from_prefill)

    def fail(self, error: TwophaseError, now_s: float) -> None:
        """This attempt is over; `attempt` may begin another."""
        self._progress.move(RequestState.FAILED)
        self.record.failed(now_s, error)

    def take_prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Those of the whole prompt, once they may be delivered; empty unless asked for, or again.

        That is with the first token: an attempt that fails before has all computed again.
        """
        told, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return told

    def take_undelivered(self) -> list[OutputToken]:
        """Tokens that may be delivered now; each is returned once."""
        tokens, self._undelivered = self._undelivered, []
        return tokens

    def delivered(self, now_s: float) -> None:
        """What `take_undelivered` returned was handed to the transport."""
        self.record.delivered(now_s)

    def stop(self, num_dropped: int) -> None:
        """The text is complete without the last `num_dropped` tokens: nothing more is needed."""
        del self.log[len(self.log) - num_dropped :]
        self._finish_reason = FinishReason.STOP
        self._is_stopped = True

    def completion(self, now_s: float, failures: tuple[str, ...] = ()) -> Completion:
        """The closing record; `failures` are those of earlier attempts."""
        self._progress.move(RequestState.FINISHED)
        prefill = self._prefill
        if self.num_attempts == 0:  # its client had all tokens
            self.record.unplaced(now_s)
            prefill = PrefillReport(0.0, 0.0, 0, 0)
        if self._finish_reason is None or prefill is None:
            raise InvariantBroken(f"request {self.request.request_id} ended incomplete")
        return self._record(self._finish_reason, prefill, now_s, failures)

    def known(self, now_s: float) -> Completion:
        """The record of a request that fails now: what was delivered, phases as far as told."""
        if self.num_attempts == 0:
            self.record.unplaced(now_s)
        prefill = self._prefill or PrefillReport(0.0, 0.0, 0, 0)
        record = self._record(FinishReason.ERROR, prefill, now_s, ())
        ttft_s = record.phases.time_to_first_token_s if self.record.is_delivered else 0.0
        return replace(
            record,
            usage=replace(record.usage, num_output_tokens=self.num_delivered_tokens),
            phases=replace(
                record.phases,
                time_to_first_token_s=ttft_s,
                delivery_s=max(record.phases.delivery_s, 0.0),
            ),
        )

    @property
    def workers(self) -> tuple[WorkerName, WorkerName]:
        """Who reads the prompt and who decodes; empty names before they were chosen."""
        if self.placement is None:
            return WorkerName(""), WorkerName("")
        return self.placement.prefill or self.placement.decode, self.placement.decode

    def _record(
        self,
        finish_reason: FinishReason,
        prefill: PrefillReport,
        now_s: float,
        failures: tuple[str, ...],
    ) -> Completion:
        prefill_worker, decode_worker = self.workers
        return Completion(
            request_id=id_of_attempt(self.request.request_id),
            finish_reason=finish_reason,
            usage=self._usage(prefill),
            phases=self.record.phases(prefill, self._transfer, self._decode, now_s),
            transfer=self._transfer,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            placement=self.placement.why if self.placement is not None else "",
            seed=self.request.sampling.seed,
            failures=failures,
            decode=self._decode_report(),
            num_resumed_tokens=self._num_resumed_tokens,
        )

    def _take_decoded(self, event: NewToken, arrived_s: float) -> None:
        if event.prefill is not None:
            self._prefill = self._heard(event.prefill)
        if event.done is not None:
            self._decode = self._heard(event.done.report)
        if self._progress.state in (RequestState.PREFILLING, RequestState.TRANSFERRING):
            self._progress.move(RequestState.DECODING)
            assert self.placement is not None
            self.prompt_holder = self.placement.decode_incarnation
        self._take_token(event.index, OutputToken(event.token_id, event.logprobs), arrived_s)

    def _take_token(self, index: int, token: OutputToken, arrived_s: float) -> None:
        self._early[self._num_resumed_tokens + index] = token
        while len(self.log) in self._early:
            token = self._early.pop(len(self.log))
            self.log.append(token.token_id)
            self._undelivered.append(token)
            self._finish_reason = self.request.finish_reason(token.token_id, len(self.log))
        self.record.token_arrived(arrived_s, is_first=index == 0)

    def _heard(self, report: Report) -> Report:
        """Note the events of a worker's report; the rest of it."""
        self.record.heard(report.events, self._num_resumed_tokens)
        return replace(report, events=())

    def _usage(self, prefill: PrefillReport) -> Usage:
        num_prompt_tokens = self.request.num_prompt_tokens
        cached = transferred = local = 0
        if not self._is_moved:
            cached = min(prefill.num_cached_tokens, num_prompt_tokens)
            local = num_prompt_tokens - cached
        elif self._reservation is not None and self._is_decoded_from_moved_kv:
            cached = min(self._reservation.num_shared_tokens, num_prompt_tokens)
            transferred = num_prompt_tokens - cached
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=len(self.log),
            num_prefill_cached_tokens=min(prefill.num_cached_tokens, num_prompt_tokens),
            num_decode_cached_tokens=cached,
            num_transferred_tokens=transferred,
            num_local_prefill_tokens=local,
        )

    def _decode_report(self) -> DecodeReport | None:
        """As decode told, in the words of users: places in the whole answer, and their own ids."""
        report = self._decode
        if report is None or report.longest_gap is None:
            return report
        gap = report.longest_gap
        index = gap.index + self._num_resumed_tokens
        prompts = tuple(dict.fromkeys(map(id_of_attempt, gap.prompts)))
        return replace(report, longest_gap=replace(gap, index=index, prompts=prompts))
