"""The state of one decode worker: reservations, running sequences, and what each router is told.

The life of a request here:

1. `reserve`: it waits for blocks, oldest first, and gets all that it can ever need; so a running
   sequence is never preempted. A prompt's cached prefix is shared, not reserved again.
2. Its KV cache arrives (`handoffs`), or its prompt is read here (`is_local`).
3. `next_steps` and `apply`: one token per step, told to the router's session.
4. `hold` stops it, where another worker is to go on with it; `ship` gives it to who sends it.
5. It ends in one place, `_end`: blocks go back to the pool, or to quarantine while the writer of
   an unfinished handoff is not fenced.

Knows no clock, no socket and no thread: `service` brings the facts. Everything runs in the event
loop's thread; only a step itself runs elsewhere, and what it uses is not freed before `apply` (or
`step_failed`) was called.
"""

from collections import defaultdict

from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PeerStopping,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.request import OutputToken, Request, RequestId
from core.worker import (
    BlockHolder,
    DecodeUpdate,
    Held,
    NewToken,
    RequestFailed,
    Reserve,
    Reserved,
    UpdateBuilder,
    WorkerInfo,
)
from decode_worker.census import Census
from decode_worker.custody import Custody
from decode_worker.handoff import Closed, Failed, Handoffs, Outcome, Proven
from decode_worker.limits import Limits
from decode_worker.meter import DecodeMeter
from decode_worker.recording import recording_of
from decode_worker.scheduler import Prompt, Scheduler
from decode_worker.sequence import Sequence, step_facts
from decode_worker.step_log import StepLog
from engine.batch import SequenceStep, StepResult
from engine.block_pool import BlockPool

# A request that waits for blocks may be passed by smaller ones for this long, then by nobody.
MAX_PASSED_S = 2.0


class DecodeWorker:
    """Sequences, blocks and steps of one worker.

    Invariants: a request id is known at most once; a sequence holds its blocks from the grant to
    its end; blocks of the running step, and blocks that an unfenced writer may reach, are never
    given back to the pool's free list.
    """

    def __init__(
        self, info: WorkerInfo, pool: BlockPool, scheduler: Scheduler, limits: Limits
    ) -> None:
        self.pool = pool
        self.handoffs = Handoffs(info.layout)
        self.meter = DecodeMeter()
        self.info = info
        self.recording = recording_of(is_on=True, token_bytes=info.layout.token_bytes)
        self.address = ""
        self.num_steps = 0
        self.is_draining = False
        self._scheduler = scheduler
        self._limits = limits
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._custody = Custody(pool)
        self._in_step: list[tuple[Sequence, int]] = []
        self._step_started_s = 0.0
        self.steps = StepLog()
        self._updates: dict[str, UpdateBuilder] = defaultdict(UpdateBuilder)

    @property
    def census(self) -> Census:
        """How many requests stand where."""
        return Census.of(self._sequences.values(), self._custody.left, len(self._in_step))

    def holders(self, now_s: float) -> list[BlockHolder]:
        """Every request that waits for blocks or holds some, quarantine included."""
        sequences = [*self._sequences.values(), *self._custody.left]
        return [sequence.holder(self.info.name, now_s) for sequence in sequences]

    def reserve(self, session_id: str, command: Reserve, now_s: float) -> None:
        """Let a request wait for blocks, or refuse it; either is told to the session."""
        request = command.request
        sequence = Sequence(session_id, request, command.prefill_locally, now_s)
        try:
            self._check(command)
        except TwophaseError as error:
            sequence.log_failed(error)
            return self.refuse(session_id, request.request_id, error)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        self._custody.is_news = True
        self._grant(now_s)

    def refuse(self, session_id: str, request_id: RequestId, error: TwophaseError) -> None:
        """Tell the session that a request is not taken, or given up."""
        self._updates[session_id].failed.append(RequestFailed(request_id, error))

    def cancel(self, session_id: str, request_id: RequestId, now_s: float) -> None:
        """Give up a request of this session; nothing happens if it is not known."""
        if (sequence := self._of_session(session_id, request_id)) is not None:
            self._end(sequence, now_s)
            self.settle(now_s)

    def hold(self, session_id: str, request_id: RequestId, now_s: float) -> None:
        """Stop an answer of this session where it is, and keep it; one that has none yet fails."""
        sequence = self._of_session(session_id, request_id)
        if sequence is None or sequence.is_held:
            return
        sequence.hold_at = sequence.num_tokens
        if not sequence.is_running:
            self._fail(sequence, PeerStopping(self.info.name), now_s)
            self.settle(now_s)
        elif not self._is_in_step(sequence):
            self._updates[session_id].held.append(Held(request_id))

    def ship(self, session_id: str, held_id: RequestId, request: Request) -> tuple[int, ...]:
        """Give a held answer to the session that ships its KV cache, and make its next token.

        The tokens so far are the prompt of `request`; the KV cache of all but the last is in the
        returned blocks, which nobody else gets before `shipped`.

        Raises:
            TransferFailed: there is no such answer.
        """
        sequence = self._sequences.get(held_id)
        if sequence is None or self._is_in_step(sequence) or not sequence.may_ship(request):
            raise TransferFailed(
                TransferFailure.REFUSED, f"{held_id} is not held with these tokens"
            )
        sequence.session_id = session_id
        sequence.hold_at = sequence.num_tokens + 1
        return self._custody.ship(session_id, sequence)

    def shipped(self, session_id: str, now_s: float) -> None:
        """The session's handoff is closed: what it shipped ends here. Idempotent."""
        sequence = self._custody.try_end_shipping(session_id)
        if sequence is not None and not sequence.is_ended:
            self._end(sequence, now_s)
        elif sequence is not None and not self._is_in_step(sequence):
            self._custody.give_back(sequence)
        self.settle(now_s)

    def lose_session(self, session_id: str, now_s: float) -> None:
        """The router is gone: give up everything that it asked for."""
        for sequence in list(self._sequences.values()):
            if sequence.session_id == session_id:
                self._end(sequence, now_s)
        self.settle(now_s)
        self._updates.pop(session_id, None)

    def hand_back(self, now_s: float) -> None:
        """Give up every request, since the worker is stopping; others may go on with them."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, PeerStopping(self.info.name), now_s)
        self.settle(now_s)

    def tick(self, now_s: float) -> None:
        """Let time pass: deadlines and leases end."""
        self.handoffs.tick(now_s)
        for sequence in list(self._sequences.values()):
            if now_s >= sequence.request.deadline_s:
                what = f"request {sequence.request.request_id}"
                late = DeadlineExceeded(f"{what} was not done within its deadline")
                self._fail(sequence, late, now_s)
        self.settle(now_s)

    def settle(self, now_s: float) -> None:
        """Act on what the handoffs decided; to be called after each thing they heard."""
        while outcomes := self.handoffs.take_outcomes():
            for outcome in outcomes:
                self._settle(outcome, now_s)
        self._grant(now_s)

    def next_steps(self, now_s: float) -> list[SequenceStep]:
        """The next step's shares; empty when there is nothing to compute.

        Contract: not to be called again before `apply` or `step_failed`.
        """
        assert not self._in_step
        running = [id_ for id_, sequence in self._sequences.items() if sequence.is_decoding]
        prompts = [
            Prompt(id_, sequence.num_remaining_prompt_tokens, sequence.request.is_scored)
            for id_, sequence in self._sequences.items()
            if sequence.is_local and sequence.reservation and not sequence.is_running
        ]
        self._step_started_s = now_s
        steps = []
        for share in self._scheduler.schedule(running, prompts):
            sequence = self._sequences[share.request_id]
            steps.append(sequence.step(share.num_tokens))
            self._in_step.append((sequence, share.num_tokens))
        return steps

    def apply(self, result: StepResult, now_s: float) -> None:
        """Take the tokens that the step sampled."""
        self.num_steps += 1
        self.meter.step(result.compute_s, now_s)
        in_step, self._in_step = self._in_step, []
        self.recording.step(self.steps, step_facts(in_step, now_s, result.compute_s))
        shares = zip(in_step, result.token_ids, strict=True)
        for i, ((sequence, num_tokens), token_id) in enumerate(shares):
            if sequence.is_ended:
                self._custody.give_back(sequence)
                continue
            slot_wait_s = sequence.try_begin_decode(self._step_started_s, self.recording.pace)
            if slot_wait_s is not None:
                self.meter.waited(slot_wait_s, now_s)
            sequence.computed(num_tokens, self.steps.last)
            if i in result.prompt_logprobs:
                told = sequence.scored(result.prompt_logprobs[i])
                self._updates[sequence.session_id].prompt_logprobs.append(told)
            if i in result.failures:
                self._fail(sequence, result.failures[i], now_s)
            if token_id is not None:
                self._take_token(sequence, OutputToken(token_id, result.logprobs.get(i)), now_s)
            if sequence.is_held and not sequence.is_ended:
                self._updates[sequence.session_id].held.append(Held(sequence.request.request_id))
        self._grant(now_s)

    def step_failed(self, error: TwophaseError, now_s: float) -> None:
        """End a step that raised: its sequences fail, the others go on."""
        in_step, self._in_step = self._in_step, []
        for sequence, _ in in_step:
            if sequence.is_ended:
                self._custody.give_back(sequence)
            else:
                self._fail(sequence, error, now_s)
        self._grant(now_s)

    def take_updates(self) -> dict[str, DecodeUpdate]:
        """What each session has to be told since the last call."""
        updates, self._updates = self._updates, defaultdict(UpdateBuilder)
        return {session_id: builder.build() for session_id, builder in updates.items()}

    def _check(self, command: Reserve) -> None:
        request = command.request
        if self.is_draining:
            raise PeerStopping(self.info.name)
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", request.request_id, "is in use")
        self._limits.check(request, self.pool.num_blocks * self.pool.block_size, len(self._waiting))

    def _settle(self, outcome: Outcome, now_s: float) -> None:
        match outcome:
            case Proven():
                self._start(outcome, now_s)
            case Failed():
                sequence = self._sequences.get(outcome.request_id)
                if sequence is not None and sequence.epoch == outcome.epoch:
                    self._fail(sequence, outcome.error, now_s)
            case Closed():
                self._custody.lift(outcome.request_id, outcome.epoch)

    def _grant(self, now_s: float) -> None:
        if not self._custody.is_news:
            return  # nothing was freed and nobody came: no need to look every prompt up again
        self._custody.is_news = False
        for sequence in list(self._waiting):
            if self._try_grant(sequence, now_s):
                self._waiting.remove(sequence)
            elif now_s - sequence.received_s > MAX_PASSED_S:
                return

    def _try_grant(self, sequence: Sequence, now_s: float) -> bool:
        request = sequence.request
        shared = self.pool.match_prefix(sequence.cacheable_token_ids)
        # The KV of the last token is never written: nothing comes after it.
        num_blocks = self.info.layout.num_blocks(request.max_num_tokens - 1)
        reservation = self.pool.reserve(num_blocks - len(shared), shared=shared)
        if reservation is None:
            return False
        sequence.reservation = reservation
        sequence.granted_s = now_s
        self.meter.waited(now_s - sequence.received_s, now_s)
        remote = sequence.remote(self.info, self.address)
        if sequence.is_local:
            sequence.num_cached_tokens = sequence.num_computed_tokens = remote.num_shared_tokens
        else:
            self.handoffs.open(sequence.inbound(remote), lease_until_s=request.deadline_s)
        self._updates[sequence.session_id].reserved.append(Reserved(request.request_id, remote))
        return True

    def _start(self, proven: Proven, now_s: float) -> None:
        sequence = self._sequences[proven.request_id]
        request = sequence.request
        sequence.num_computed_tokens = request.num_prompt_tokens
        sequence.output_token_ids.append(proven.first_token_id)
        sequence.ready_s = now_s
        self._custody.publish(sequence)
        if request.finish_reason(proven.first_token_id, 1) is not None:
            self._end(sequence, now_s)

    def _take_token(self, sequence: Sequence, token: OutputToken, now_s: float) -> None:
        request, index = sequence.request, len(sequence.output_token_ids)
        sequence.output_token_ids.append(token.token_id)
        prefill = None
        if sequence.pace is not None:
            sequence.pace.token(index, self.steps)
        if not sequence.is_running:
            sequence.ready_s = now_s
            prefill = sequence.prefill_report(now_s)
            self._custody.publish(sequence)
        finish_reason = request.finish_reason(token.token_id, index + 1)
        done = None if finish_reason is None else sequence.done(finish_reason)
        self._updates[sequence.session_id].tokens.append(
            NewToken(request.request_id, token.token_id, index, done, prefill, token.logprobs)
        )
        if done is not None:
            self._end(sequence, now_s)

    def _fail(self, sequence: Sequence, error: TwophaseError, now_s: float) -> None:
        sequence.log_failed(error)
        self.refuse(sequence.session_id, sequence.request.request_id, error)
        self._end(sequence, now_s)

    def _end(self, sequence: Sequence, now_s: float) -> None:
        del self._sequences[sequence.request.request_id]
        sequence.is_ended = True
        if sequence.reservation is None:
            self._waiting.remove(sequence)
            self._custody.is_news = True
        elif not sequence.is_local and not sequence.is_running:
            self._custody.quarantine(sequence)
            request_id, epoch = sequence.request.request_id, sequence.epoch
            self.handoffs.abort(request_id, epoch, TransferFailure.ABORTED, now_s)
        elif not self._is_in_step(sequence):
            self._custody.give_back(sequence)

    def _of_session(self, session_id: str, request_id: RequestId) -> Sequence | None:
        sequence = self._sequences.get(request_id)
        return sequence if sequence is not None and sequence.session_id == session_id else None

    def _is_in_step(self, sequence: Sequence) -> bool:
        return any(sequence is other for other, _ in self._in_step)
