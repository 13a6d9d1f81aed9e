"""The state of one decode worker: reservations, running sequences, and what each router is told.

The life of a request here:

1. `reserve`: it waits for blocks, oldest first, and gets all that it can ever need; so a running
   sequence is never preempted. A prompt's cached prefix is shared, not reserved again.
2. Its KV cache arrives (`handoffs`), or its prompt is read here (`is_local`).
3. `next_steps` and `apply`: one token per step, told to the router's session.
4. It ends in one place, `_end`: blocks go back to the pool, or to quarantine while the writer of
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
    TransferFailure,
    TwophaseError,
)
from core.request import OutputToken, RequestId
from core.worker import (
    BlockHolder,
    DecodeDone,
    DecodeUpdate,
    NewToken,
    RequestFailed,
    Reserve,
    Reserved,
    UpdateBuilder,
    WorkerInfo,
)
from decode_worker.counts import StepCounts
from decode_worker.handoff import Closed, Failed, Handoffs, Outcome, Proven
from decode_worker.limits import Limits
from decode_worker.meter import DecodeMeter
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
        self.counts = StepCounts(info.layout.token_bytes)
        self.address = ""
        self.num_steps = 0
        self.is_draining = False
        self._info = info
        self._scheduler = scheduler
        self._limits = limits
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._is_grant_due = False
        self._fencing: dict[tuple[RequestId, int], Sequence] = {}
        self._in_step: list[tuple[Sequence, int]] = []
        self._step_started_s = 0.0
        self._steps = StepLog()
        self._updates: dict[str, UpdateBuilder] = defaultdict(UpdateBuilder)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks yet."""
        return len(self._waiting)

    @property
    def num_known(self) -> int:
        """Requests that wait, receive, or run."""
        return len(self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences whose prompt is complete."""
        return sum(sequence.is_running for sequence in self._sequences.values())

    @property
    def num_runnable(self) -> int:
        """Sequences whose next step waits for the device alone, or that are in one."""
        return max(sum(s.is_runnable for s in self._sequences.values()), len(self._in_step))

    @property
    def num_reservations(self) -> int:
        """Requests that hold blocks."""
        return len(self._sequences) - len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are still to be read here."""
        return sum(s.num_remaining_prompt_tokens for s in self._sequences.values() if s.is_local)

    def holders(self, now_s: float) -> list[BlockHolder]:
        """Every request that waits for blocks or holds some, quarantine included."""
        sequences = [*self._sequences.values(), *self._fencing.values()]
        return [sequence.holder(self._info.name, now_s) for sequence in sequences]

    def reserve(self, session_id: str, command: Reserve, now_s: float) -> None:
        """Let a request wait for blocks, or refuse it; either is told to the session."""
        request = command.request
        try:
            self._check(command)
        except TwophaseError as error:
            return self.refuse(session_id, request.request_id, error)
        sequence = Sequence(session_id, request, command.prefill_locally, now_s)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        self._is_grant_due = True
        self._grant(now_s)

    def refuse(self, session_id: str, request_id: RequestId, error: TwophaseError) -> None:
        """Tell the session that a request is not taken, or given up."""
        self._updates[session_id].failed.append(RequestFailed(request_id, error))

    def cancel(self, session_id: str, request_id: RequestId, now_s: float) -> None:
        """Give up a request of this session; nothing happens if it is not known."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.session_id == session_id:
            self._end(sequence, now_s)
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
            self._fail(sequence, PeerStopping(self._info.name), now_s)
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
        running = [id_ for id_, sequence in self._sequences.items() if sequence.is_running]
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
        self._steps.add(facts := step_facts(in_step, now_s, result.compute_s))
        self.counts.step(facts)
        shares = zip(in_step, result.token_ids, strict=True)
        for i, ((sequence, num_tokens), token_id) in enumerate(shares):
            if sequence.is_ended:
                self._give_back(sequence)
                continue
            if (slot_wait_s := sequence.try_begin_decode(self._step_started_s)) is not None:
                self.meter.waited(slot_wait_s, now_s)
            sequence.computed(num_tokens, self._steps.last)
            if i in result.prompt_logprobs:
                told = sequence.scored(result.prompt_logprobs[i])
                self._updates[sequence.session_id].prompt_logprobs.append(told)
            if i in result.failures:
                self._fail(sequence, result.failures[i], now_s)
            if token_id is not None:
                self._take_token(sequence, OutputToken(token_id, result.logprobs.get(i)), now_s)
        self._grant(now_s)

    def step_failed(self, error: TwophaseError, now_s: float) -> None:
        """End a step that raised: its sequences fail, the others go on."""
        in_step, self._in_step = self._in_step, []
        for sequence, _ in in_step:
            if sequence.is_ended:
                self._give_back(sequence)
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
            raise PeerStopping(self._info.name)
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", request.request_id, "is in use")
        self._limits.check(request, self.pool.num_blocks * self.pool.block_size, self.num_waiting)

    def _settle(self, outcome: Outcome, now_s: float) -> None:
        match outcome:
            case Proven():
                self._start(outcome, now_s)
            case Failed():
                sequence = self._sequences.get(outcome.request_id)
                if sequence is not None and sequence.epoch == outcome.epoch:
                    self._fail(sequence, outcome.error, now_s)
            case Closed():
                self._fenced(outcome)

    def _grant(self, now_s: float) -> None:
        if not self._is_grant_due:
            return  # nothing was freed and nobody came: no need to look every prompt up again
        self._is_grant_due = False
        for sequence in list(self._waiting):
            if self._try_grant(sequence, now_s):
                self._waiting.remove(sequence)
            elif now_s - sequence.received_s > MAX_PASSED_S:
                return

    def _try_grant(self, sequence: Sequence, now_s: float) -> bool:
        request = sequence.request
        shared = self.pool.match_prefix(sequence.cacheable_token_ids)
        # The KV of the last token is never written: nothing comes after it.
        num_blocks = self._info.layout.num_blocks(request.max_num_tokens - 1)
        reservation = self.pool.reserve(num_blocks - len(shared), shared=shared)
        if reservation is None:
            return False
        sequence.reservation = reservation
        sequence.granted_s = now_s
        self.meter.waited(now_s - sequence.received_s, now_s)
        remote = sequence.remote(self._info, self.address)
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
        self._publish(sequence)
        if request.finish_reason(proven.first_token_id, 1) is not None:
            self._end(sequence, now_s)

    def _take_token(self, sequence: Sequence, token: OutputToken, now_s: float) -> None:
        request, index = sequence.request, len(sequence.output_token_ids)
        sequence.output_token_ids.append(token.token_id)
        prefill = None
        if sequence.pace is not None:
            sequence.pace.token(index, self._steps)
        if not sequence.is_running:
            sequence.ready_s = now_s
            prefill = sequence.prefill_report(now_s)
            self._publish(sequence)
        finish_reason = request.finish_reason(token.token_id, index + 1)
        done = None
        if finish_reason is not None:
            done = DecodeDone(finish_reason, sequence.decode_report())
        self._updates[sequence.session_id].tokens.append(
            NewToken(request.request_id, token.token_id, index, done, prefill, token.logprobs)
        )
        if done is not None:
            self._end(sequence, now_s)

    def _fail(self, sequence: Sequence, error: TwophaseError, now_s: float) -> None:
        self.refuse(sequence.session_id, sequence.request.request_id, error)
        self._end(sequence, now_s)

    def _end(self, sequence: Sequence, now_s: float) -> None:
        del self._sequences[sequence.request.request_id]
        sequence.is_ended = True
        if sequence.reservation is None:
            self._waiting.remove(sequence)
            self._is_grant_due = True
        elif not sequence.is_local and not sequence.is_running:
            self._fence(sequence, now_s)
        elif all(sequence is not other for other, _ in self._in_step):
            self._give_back(sequence)

    def _fence(self, sequence: Sequence, now_s: float) -> None:
        """Quarantine the blocks of an unfinished handoff; `_fenced` frees them."""
        assert sequence.reservation is not None
        request_id, epoch = sequence.request.request_id, sequence.epoch
        self.pool.quarantine(sequence.reservation.fresh_block_ids)
        self.pool.release(sequence.reservation.block_ids[: sequence.reservation.num_shared])
        self._fencing[request_id, epoch] = sequence
        self.handoffs.abort(request_id, epoch, TransferFailure.ABORTED, now_s)

    def _fenced(self, closed: Closed) -> None:
        sequence = self._fencing.pop((closed.request_id, closed.epoch))
        assert sequence.reservation is not None
        self.pool.lift_quarantine(sequence.reservation.fresh_block_ids)
        self._is_grant_due = True

    def _publish(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        request = sequence.request
        token_ids = [*request.prompt_token_ids, *sequence.output_token_ids]
        self._is_grant_due = True  # a waiting prompt may share what is findable now
        self.pool.publish(token_ids, sequence.reservation.block_ids, sequence.num_computed_tokens)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        self._publish(sequence)
        self.pool.release(sequence.reservation.block_ids)
        self._is_grant_due = True
