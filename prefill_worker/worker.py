"""The state of one prefill worker: who waits, whose blocks are whose, what was computed.

The life of a prompt here:

1. `add`: it waits, oldest first.
2. `next_steps`: it gets blocks (all that it needs, so it never stops half way) and shares of steps.
3. `apply`: what a step computed is told as Computed, so that it can be pushed while the next
   chunk runs; the last one carries the answer's first token.
4. `release`: its blocks go back, once; the full ones stay findable in the prefix index.

Knows no clock, no socket, no thread and no transfer: `service` brings the facts and does the
pushing. Everything runs in the event loop's thread; only the step itself runs elsewhere, and what
it uses is not freed before `apply` (or `step_failed`) was called.
"""

from dataclasses import dataclass, field, replace

from core.errors import InvalidRequest, Overloaded, TwophaseError
from core.events.chunks import Chunks
from core.request import Logprobs, OutputToken, Request, RequestId, WorkerName
from core.tally import Tally
from core.timeline import PrefillReport
from core.worker import BlockHolder
from engine.batch import SequenceStep, StepResult
from engine.block_pool import BlockPool, Reservation
from engine.sampling.logits import history_of
from prefill_worker.counts import StepCounts
from prefill_worker.meter import PrefillMeter
from prefill_worker.scheduler import Candidate, Scheduler


@dataclass(frozen=True, slots=True)
class Computed:
    """The KV cache of a prompt's first `num_tokens` tokens lies in `block_ids`, its block table.

    first_token and report come when that is the whole prompt; error in their place when no first
    token could be chosen. prompt_logprobs, where asked for, are those of the tokens that the step
    added, and the one after them.
    """

    request_id: RequestId
    num_tokens: int
    block_ids: tuple[int, ...]
    first_token: OutputToken | None = None
    report: PrefillReport | None = None
    error: TwophaseError | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The first `num_layers` layers of a prompt's first `num_tokens` tokens lie in `block_ids`."""

    request_id: RequestId
    num_tokens: int
    num_layers: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Sequence:
    request: Request
    enqueued_s: float
    reservation: Reservation | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    chunks: Chunks = field(default_factory=Chunks)
    is_released: bool = False

    @property
    def num_remaining_tokens(self) -> int:
        return self.request.num_prompt_tokens - self.num_computed_tokens


class PrefillWorker:
    """Prompts, blocks and steps of one worker.

    Invariants: a sequence holds a reservation from its first step until `release`; a block of the
    running step is never given back; `counts` is back at its start when nothing is held.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_batch_tokens: int, max_waiting: int
    ) -> None:
        self.pool = pool
        self.meter = PrefillMeter()
        self.tally = Tally()
        self.num_steps = 0
        self._block_size = block_size
        self._max_waiting = max_waiting
        self._scheduler = Scheduler(max_batch_tokens)
        self._counts = StepCounts(self.tally)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._in_step: list[tuple[_Sequence, int]] = []

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks yet."""
        return sum(s.reservation is None for s in self._sequences.values())

    @property
    def num_running(self) -> int:
        """Prompts that hold blocks."""
        return len(self._sequences) - self.num_waiting

    @property
    def num_runnable(self) -> int:
        """Prompts whose next step waits for the device alone, or that are in one."""
        computing = sum(
            s.reservation is not None and s.num_remaining_tokens > 0
            for s in self._sequences.values()
        )
        # Where nobody holds blocks, the first that waits for some can have them.
        runnable = computing if self.num_running > 0 else self.num_waiting
        return max(runnable, len(self._in_step))

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are still to be read."""
        return sum(s.num_remaining_tokens for s in self._sequences.values())

    @property
    def num_parked(self) -> int:
        """Prompts that are read and not released: their KV cache is on its way."""
        return sum(s.num_remaining_tokens == 0 for s in self._sequences.values())

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the prompt that waits longest for its first step has waited."""
        in_step = {id(sequence) for sequence, _ in self._in_step}
        waits = [
            now_s - s.enqueued_s
            for s in self._sequences.values()
            if s.chunks.num == 0 and id(s) not in in_step
        ]
        return max(waits, default=0.0)

    def holders(self, worker: WorkerName, now_s: float) -> list[BlockHolder]:
        """Every prompt that waits for blocks or holds some."""
        return [_holder(worker, sequence, now_s) for sequence in self._sequences.values()]

    def add(self, request: Request, now_s: float) -> None:
        """Let a prompt wait for its turn.

        Raises:
            InvalidRequest: the id is in use, or the prompt needs more blocks than there are.
            Overloaded: as many prompts wait as may.
        """
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", request.request_id, "is in use")
        limit = self.pool.num_blocks * self._block_size
        if request.num_prompt_tokens > limit:
            raise InvalidRequest(
                "prompt",
                f"{request.num_prompt_tokens} tokens",
                f"the KV cache of a prefill worker holds {limit} tokens",
            )
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} prompts wait at this prefill worker")
        self._sequences[request.request_id] = _Sequence(request, now_s)

    def next_steps(self) -> list[SequenceStep]:
        """The next step's shares; empty when there is nothing to compute.

        Contract: not to be called again before `apply` or `step_failed`.
        """
        assert not self._in_step
        self._reserve_in_order()
        candidates = [
            Candidate(
                request_id, sequence.num_remaining_tokens, is_scored=sequence.request.is_scored
            )
            for request_id, sequence in self._sequences.items()
            if sequence.reservation is not None and sequence.num_remaining_tokens > 0
        ]
        steps = []
        for share in self._scheduler.schedule(candidates):
            sequence = self._sequences[share.request_id]
            steps.append(_step(sequence, share.num_tokens))
            self._in_step.append((sequence, share.num_tokens))
        return steps

    def layer_computed(self, num_layers: int) -> list[LayersComputed]:
        """The running step has done its first `num_layers` layers."""
        return [
            LayersComputed(
                sequence.request.request_id,
                sequence.num_computed_tokens + num_tokens,
                num_layers,
                sequence.reservation.block_ids,
            )
            for sequence, num_tokens in self._in_step
            if not sequence.is_released and sequence.reservation is not None
        ]

    def apply(self, result: StepResult, now_s: float) -> list[Computed]:
        """What the step made ready to be pushed."""
        computed = []
        self.num_steps += 1
        num_tokens_in_step = sum(num_tokens for _, num_tokens in self._in_step)
        self.meter.step(num_tokens_in_step, result.compute_s, now_s)
        self._counts.step(num_tokens_in_step, result.compute_s)
        shares = zip(self._in_step, result.token_ids, strict=True)
        for i, ((sequence, num_tokens), token_id) in enumerate(shares):
            if sequence.chunks.num == 0:
                self.meter.waited(now_s - result.compute_s - sequence.enqueued_s, now_s)
            sequence.num_computed_tokens += num_tokens
            sequence.chunks.add(num_tokens, len(self._in_step), result.compute_s, now_s)
            if not sequence.is_released:
                token = None
                if token_id is not None:
                    token = OutputToken(token_id, result.logprobs.get(i))
                told = self._computed(sequence, token, now_s)
                prompt_logprobs = result.prompt_logprobs.get(i, ())
                error = result.failures.get(i)
                computed.append(replace(told, error=error, prompt_logprobs=prompt_logprobs))
        self._end_step()
        return computed

    def step_failed(self) -> list[RequestId]:
        """End a step that raised; returns whose prompts were in it."""
        failed = [s.request.request_id for s, _ in self._in_step if not s.is_released]
        self._end_step()
        return failed

    def release(self, request_id: RequestId) -> None:
        """Give back what a prompt holds; idempotent."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.is_released = True
        if all(sequence is not other for other, _ in self._in_step):
            self._give_back(sequence)

    def _reserve_in_order(self) -> None:
        # Nobody passes a prompt that waits for blocks: it would starve behind small ones.
        for sequence in self._sequences.values():
            if sequence.reservation is not None:
                continue
            prompt = sequence.request.prompt_token_ids
            shared = self.pool.match_prefix(sequence.request.cacheable_token_ids)
            num_fresh = -(-len(prompt) // self._block_size) - len(shared)
            sequence.reservation = self.pool.reserve(num_fresh, shared=shared)
            if sequence.reservation is None:
                return
            sequence.num_cached_tokens = len(shared) * self._block_size
            sequence.num_computed_tokens = sequence.num_cached_tokens

    def _computed(self, sequence: _Sequence, token: OutputToken | None, now_s: float) -> Computed:
        assert sequence.reservation is not None
        report = None
        if sequence.num_remaining_tokens == 0:
            self._publish(sequence)
            report = sequence.chunks.report(sequence.enqueued_s, sequence.num_cached_tokens, now_s)
        return Computed(
            sequence.request.request_id,
            sequence.num_computed_tokens,
            sequence.reservation.block_ids,
            token,
            report,
        )

    def _end_step(self) -> None:
        ended, self._in_step = self._in_step, []
        for sequence, _ in ended:
            if sequence.is_released:
                self._give_back(sequence)

    def _give_back(self, sequence: _Sequence) -> None:
        if sequence.reservation is None:
            return
        self._publish(sequence)
        self.pool.release(sequence.reservation.block_ids)
        sequence.reservation = None

    def _publish(self, sequence: _Sequence) -> None:
        assert sequence.reservation is not None
        self.pool.publish(
            sequence.request.prompt_token_ids,
            sequence.reservation.block_ids,
            sequence.num_computed_tokens,
        )


def _holder(worker: WorkerName, sequence: _Sequence, now_s: float) -> BlockHolder:
    reservation = sequence.reservation
    if reservation is None:
        state = "waiting"
    else:
        state = "computing" if sequence.num_remaining_tokens > 0 else "pushing"
    return BlockHolder(
        worker=worker,
        request_id=sequence.request.request_id,
        state=state,
        num_blocks=len(reservation.block_ids) if reservation is not None else 0,
        epoch=reservation.epoch if reservation is not None else 0,
        age_s=now_s - sequence.enqueued_s,
    )


def _step(sequence: _Sequence, num_tokens: int) -> SequenceStep:
    assert sequence.reservation is not None
    request, start = sequence.request, sequence.num_computed_tokens
    end = start + num_tokens
    is_last = end == request.num_prompt_tokens
    return SequenceStep(
        token_ids=request.prompt_token_ids[start:end],
        start=start,
        block_table=sequence.reservation.block_ids,
        sampling=request.sampling if is_last else None,
        history=history_of(request, ()) if is_last else None,
        targets=request.targets(start, end),
        num_top=request.sampling.num_prompt_logprobs or 0,
    )
