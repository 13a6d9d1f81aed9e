"""One request's way through the front door, whatever protocol it came by.

1 its place inside (`running`)          4 workers and tokens (`dispatch`)
2 the cluster's limits and the model    5 text for each token (`answer_text`)
3 prompt to token ids, in a thread      6 counted and logged

`service` (gRPC) and `http` unpack their messages into an `Incoming` and write what `deliver` is
given; they know no worker, and this module knows no message. When the caller goes away its task
is cancelled, and whatever the request held is given back on the way out.

Runs in the router's event loop.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from core.clock import Clock
from core.completion import Chunk, Completion
from core.config import Mode
from core.errors import InvalidRequest, PeerLost, TwophaseError
from core.request import OutputToken, Request, Sender, answer_id, log_name
from core.worker import Role
from router.answer import Answer
from router.config import FrontDoorConfig
from router.constraint import grammar_of
from router.dispatch import Dispatcher
from router.incoming import Incoming
from router.keys import caller
from router.members.fleet import Fleet
from router.placing.load import max_tokens_of
from router.readiness import Readiness
from router.request import (
    MAX_NAME,
    Limits,
    check_model,
    num_answers_of,
    resumption_of,
    sampling_of,
    stop_strings_of,
    token_ids_of,
)
from router.running import RunningRequest, RunningRequests
from router.several import Deliver, Delivery, Make, make_answers
from router.telemetry.decisions import Decisions
from router.telemetry.history import History
from router.telemetry.measured import Measured
from router.telemetry.recorder import Recorder
from router.telemetry.totals import KvCounters
from router.text.answer_text import AnswerText
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from router.tracing.traces import Traces

# At most 20 alternatives each: below gRPC's usual 4 MiB.
PROMPT_LOGPROBS_PER_MESSAGE = 1024
# A call that is cancelled so shortly before its deadline was not given up by its client.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What all services share: who is inside, who was, is the cluster ready, what was measured.

    traces tell others what was measured; decisions: what was decided lately about the sizes of the
    pools. recorder, where one is asked for, writes down who left.
    """

    readiness: Readiness
    counters: KvCounters
    running: RunningRequests
    history: History
    traces: Traces
    measured: Measured = field(default_factory=Measured)
    decisions: Decisions = field(default_factory=Decisions)
    recorder: Recorder | None = None


class Generation:
    """Runs requests; stateless but for the counters it shares."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        door: FrontDoor,
        *,
        config: FrontDoorConfig,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._counters = door.counters
        self._running = door.running
        self._history = door.history
        self._traces = door.traces
        self._measured = door.measured
        self._recorder = door.recorder
        self._config = config
        self._clock = clock
        self._limits: Limits | None = None
        self._max_n = min(config.router.max_n, config.router.max_active_requests)
        self._log = logging.getLogger("twophase.router")

    async def run(self, incoming: Incoming, deliver: Deliver) -> tuple[Completion, ...]:
        """Serve `incoming`; returns how each answer ended, as its last delivery has told.

        Args:
            incoming: any content; what cannot be served is refused.
            deliver: is awaited with each delivery in order; returns when it was handed to the
                transport.

        Raises:
            InvalidRequest, Overloaded, DeadlineExceeded, Cancelled, PeerLost, TransferFailed: as
                their names say, with what was known of the answer; logged here.
        """
        incoming = replace(incoming, trace=self._traces.begun(incoming.trace))
        try:
            num_answers = num_answers_of(incoming.asked, self._max_n)
            id_, received_s = incoming.request_id, incoming.received_s
            with self._running.entered(id_, received_s, num_answers) as running:
                request = await self._checked(incoming)
                prompt_read = asyncio.Event()
                make = self._making(incoming, request, running, prompt_read)
                try:
                    completions = await make_answers(num_answers, make, deliver, prompt_read)
                except (asyncio.CancelledError, TwophaseError):
                    self._remember_failed(incoming, running)
                    raise
                finally:
                    self._measured.left(running.answers)
                    if self._recorder is not None:
                        self._recorder.left(received_s, running.answers)
        except BaseException as error:
            self._measured.failed(error, is_late=self._is_late(incoming))
            if isinstance(error, TwophaseError):
                self._log.info("request %s: %s", incoming.log_name, error)
            raise
        self._measured.finished(completions)
        for completion, answer in zip(completions, running.answers, strict=True):
            self._counters.finished(completion)
            name = answer_id(incoming.request_id, answer.index)
            self._remember(incoming, replace(completion, request_id=name), answer)
            self._log_completion(log_name(name, incoming.trace_id), completion)
        return completions

    def _remember_failed(self, incoming: Incoming, running: RunningRequest) -> None:
        answer, known = running.answer, running.known(self._clock.now_s())
        if answer is not None and known is not None:
            self._remember(incoming, known, answer)

    def _remember(self, incoming: Incoming, completion: Completion, answer: Answer) -> None:
        self._history.add(completion, answer.record)
        self._traces.ended(
            incoming.trace,
            completion,
            answer.record,
            answer.request,
            model=self._config.model,
            operation=incoming.operation,
        )

    def bytes_of(self, token_id: int) -> bytes:
        """What one token stands for, as `Tokenizer.bytes_of`."""
        return self._tokenizer.bytes_of(token_id)

    def pieces_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, a character with the last of its own; joined, of all."""
        text = Detokenizer(self._tokenizer)
        *pieces, last = [text.push([token_id]) for token_id in token_ids]
        return [*pieces, last + text.finish()]

    def limits(self) -> Limits:
        """What the connected workers can serve: the largest of each pool count.

        Where none decodes now, what those before could: a request waits in line for the next one.

        Raises:
            PeerLost: no decode worker was ever connected.
        """
        decode = [member.info for member in self._fleet.members(Role.DECODE)]
        if not decode:
            if self._limits is None:
                raise PeerLost("cluster", "no decode worker is connected")
            return self._limits
        prefill = [member.info for member in self._fleet.members(Role.PREFILL)]
        is_split = self._config.mode is Mode.DISAGGREGATED
        self._limits = Limits(
            model=self._config.model,
            vocab_size=min(info.vocab_size for info in decode + prefill),
            max_context_tokens=max(map(max_tokens_of, decode)),
            max_prompt_tokens=max(map(max_tokens_of, prefill), default=None) if is_split else None,
        )
        return self._limits

    def _is_late(self, incoming: Incoming) -> bool:
        """Whether the client's time is over; gRPC ends such a call itself, perhaps before us."""
        if incoming.time_limit_s is None:
            return False
        return self._clock.now_s() >= incoming.received_s + incoming.time_limit_s - LATE_S

    async def _checked(self, incoming: Incoming) -> Request:
        limits = self.limits()
        check_model(incoming.model, limits)
        token_ids = await asyncio.to_thread(token_ids_of, incoming.prompt, self._tokenizer, limits)
        asked, eos_token_ids = incoming.asked, self._tokenizer.eos_token_ids
        grammar = None
        if asked.constraint is not None:
            grammar = await asyncio.to_thread(grammar_of, asked.constraint, asked, eos_token_ids)
        sampling = sampling_of(
            asked,
            len(token_ids),
            eos_token_ids,
            limits,
            defaults=incoming.defaults,
            grammar=grammar,
        )
        most_s = self._config.router.default_deadline_s
        limit_s = most_s if incoming.time_limit_s is None else min(incoming.time_limit_s, most_s)
        return Request(
            incoming.request_id,
            token_ids,
            sampling,
            incoming.received_s + limit_s,
            sender=_sender(incoming.sender),
            trace_id=incoming.trace_id,
            mark=incoming.mark,
            resumption=resumption_of(incoming.resumed_token_ids, asked, sampling, limits),
        )

    def _making(
        self,
        incoming: Incoming,
        request: Request,
        running: RunningRequest,
        prompt_read: asyncio.Event,
    ) -> Make:
        """What makes one of the request's answers; `prompt_read` is set once decode has begun."""
        stops, received_s = stop_strings_of(incoming.asked), running.received_s
        tokenize_s = self._clock.now_s() - received_s

        async def make(index: int, deliver: Deliver) -> Completion:
            answer = Answer(request.answer(index), received_s, tokenize_s, index=index)
            if index > 0:
                answer.prompt_holder = running.answers[0].prompt_holder
            running.answers.append(answer)
            text = AnswerText(self._tokenizer, stops, min_tokens=request.sampling.min_tokens)
            if request.resumption is not None:
                _read_again(text, request.resumption.token_ids)
                if text.is_stopped:
                    answer.stop(0)

            async def deliver_noting(delivery: Delivery) -> None:
                if answer.prompt_holder:
                    prompt_read.set()
                await deliver(delivery)

            return await self._answer(answer, text, deliver_noting)

        return make

    async def _answer(self, answer: Answer, text: AnswerText, deliver: Deliver) -> Completion:
        request, index = answer.request, answer.index
        meter = self._measured.meter(answer, self._clock)

        async def deliver_tokens(tokens: list[OutputToken]) -> int | None:
            told = answer.take_prompt_logprobs()
            for start in range(0, len(told), PROMPT_LOGPROBS_PER_MESSAGE):
                part = told[start : start + PROMPT_LOGPROBS_PER_MESSAGE]
                await deliver(
                    Delivery(request, (Chunk("", (), index=index, prompt_logprobs=part),))
                )
            chunks: list[Chunk] = []
            for token in tokens:
                logprobs = () if token.logprobs is None else (token.logprobs,)
                piece = text.push(token.token_id)
                chunks.append(Chunk(piece, (token.token_id,), logprobs=logprobs, index=index))
                if text.is_stopped:
                    break
            await deliver(Delivery(request, tuple(chunks)))
            meter.delivered(len(chunks))
            return len(chunks) if text.is_stopped else None

        completion = await self._dispatcher.run(answer, deliver=deliver_tokens)
        told = _without_others(completion) if caller.get() else completion
        await deliver(Delivery(request, (Chunk(text.finish(), (), told, index=index),)))
        return completion

    def _log_completion(self, name: str, completion: Completion) -> None:
        usage, phases = completion.usage, completion.phases
        self._log.info(
            "request %s: %s, %d prompt and %d output tokens, first token %.3f s, total %.3f s, "
            "%s to %s",
            name,
            completion.finish_reason,
            usage.num_prompt_tokens,
            usage.num_output_tokens,
            phases.time_to_first_token_s,
            phases.total_s,
            completion.prefill_worker,
            completion.decode_worker,
        )


def _read_again(text: AnswerText, token_ids: tuple[int, ...]) -> None:
    """Bring `text` to where it was; what it says again, the client has."""
    for index, token_id in enumerate(token_ids):
        if text.is_stopped:
            limit = "the answer ends before it, with a stop string"
            raise InvalidRequest(f"resumption.token_ids[{index}]", token_id, limit)
        text.push(token_id)


def _without_others(completion: Completion) -> Completion:
    """The record without the ids of requests that may be of another API key."""
    if completion.decode is None or completion.decode.longest_gap is None:
        return completion
    gap = replace(completion.decode.longest_gap, prompts=())
    return replace(completion, decode=replace(completion.decode, longest_gap=gap))


def _sender(said: Sender) -> Sender:
    """Whom a request is for; a key, where one was asked for, counts more than what it says."""
    client = caller.get() or said.client
    return replace(said, client=client[:MAX_NAME], session=said.session[:MAX_NAME])
