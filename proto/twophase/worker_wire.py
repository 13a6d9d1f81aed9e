"""Messages between router and workers, to core types and back.

A deadline is absolute monotonic seconds in a process and remaining seconds on the wire, so these
functions take the clock's `now_s` where a request crosses.
"""

from dataclasses import replace

from core.events.clock_offset import WorkerClock
from core.request import FinishReason, Request, RequestId, SamplingParams, WorkerName
from core.timeline import TransferReport
from core.worker import (
    CancelRequest,
    DecodeCommand,
    DecodeDone,
    DecodeUpdate,
    FirstToken,
    Held,
    HoldRequest,
    NewToken,
    PrefillEvent,
    PromptLogprobs,
    RemoteReservation,
    RequestFailed,
    Reserve,
    Reserved,
)
from twophase import errors
from twophase.event_wire import OWN_CLOCK, event_to_wire, events_from_wire
from twophase.report_wire import (
    decode_report_from_wire,
    decode_report_to_wire,
    prefill_report_from_wire,
    prefill_report_to_wire,
)
from twophase.v1 import inference_pb2
from twophase.v1 import worker_pb2 as pb
from twophase.wire import (
    logprobs_from_wire,
    logprobs_to_wire,
)


def request_to_wire(request: Request, now_s: float) -> pb.WireRequest:
    """A request as a message, its deadline as the time that remains."""
    sampling = request.sampling
    return pb.WireRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=pb.WireSampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=[
                inference_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in sampling.logit_bias
            ],
            num_logprobs=sampling.num_logprobs,
            grammar=sampling.grammar,
            num_prompt_logprobs=sampling.num_prompt_logprobs,
        ),
        remaining_s=request.deadline_s - now_s,
        num_resumed_tokens=request.num_resumed_tokens,
        trace_id=request.trace_id,
    )


def request_from_wire(message: pb.WireRequest, now_s: float) -> Request:
    """A request from its message; raises InvalidRequest as SamplingParams does."""
    sampling = message.sampling
    return Request(
        request_id=RequestId(message.request_id),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
            grammar=sampling.grammar if sampling.HasField("grammar") else None,
            num_prompt_logprobs=sampling.num_prompt_logprobs
            if sampling.HasField("num_prompt_logprobs")
            else None,
        ),
        deadline_s=now_s + message.remaining_s,
        num_resumed_tokens=message.num_resumed_tokens,
        trace_id=message.trace_id,
    )


def reservation_to_wire(reservation: RemoteReservation) -> pb.WireReservation:
    """A reservation as a message."""
    return pb.WireReservation(
        decode_worker=reservation.decode_worker,
        decode_address=reservation.decode_address,
        decode_incarnation=reservation.decode_incarnation,
        epoch=reservation.epoch,
        block_ids=reservation.block_ids,
        num_shared_blocks=reservation.num_shared_blocks,
        num_shared_tokens=reservation.num_shared_tokens,
        prompt_digest=reservation.prompt_digest,
    )


def reservation_from_wire(message: pb.WireReservation) -> RemoteReservation:
    """A reservation from its message."""
    return RemoteReservation(
        decode_worker=WorkerName(message.decode_worker),
        decode_address=message.decode_address,
        decode_incarnation=message.decode_incarnation,
        epoch=message.epoch,
        block_ids=tuple(message.block_ids),
        num_shared_blocks=message.num_shared_blocks,
        num_shared_tokens=message.num_shared_tokens,
        prompt_digest=message.prompt_digest,
    )


def prefill_event_to_wire(event: PrefillEvent) -> pb.PrefillEvent:
    """A prefill's answer as a message."""
    if isinstance(event, PromptLogprobs):
        return pb.PrefillEvent(prompt_logprobs=_prompt_logprobs_to_wire(event))
    if isinstance(event, FirstToken):
        return pb.PrefillEvent(
            first_token=pb.FirstToken(
                token_id=event.token_id,
                times=prefill_report_to_wire(event.report),
                logprobs=None if event.logprobs is None else logprobs_to_wire(event.logprobs),
            )
        )
    return pb.PrefillEvent(
        transfer_done=pb.TransferDone(
            backend=event.backend,
            num_bytes=event.num_bytes,
            num_pieces=event.num_pieces,
            push_s=event.push_s,
            exposed_s=event.exposed_s,
            events=map(event_to_wire, event.events),
        )
    )


def prefill_event_from_wire(
    message: pb.PrefillEvent, clock: WorkerClock = OWN_CLOCK
) -> PrefillEvent:
    """A prefill's answer from its message; `clock` is the sender's."""
    if message.HasField("prompt_logprobs"):
        return _prompt_logprobs_from_wire(message.prompt_logprobs)
    if message.HasField("first_token"):
        first = message.first_token
        return FirstToken(
            first.token_id,
            prefill_report_from_wire(first.times, clock),
            logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None,
        )
    done = message.transfer_done
    return TransferReport(
        done.backend,
        done.num_bytes,
        done.num_pieces,
        done.push_s,
        done.exposed_s,
        events_from_wire(done.events, clock),
    )


def _prompt_logprobs_to_wire(event: PromptLogprobs) -> pb.PromptLogprobs:
    logprobs = map(logprobs_to_wire, event.logprobs)
    return pb.PromptLogprobs(request_id=event.request_id, logprobs=logprobs)


def _prompt_logprobs_from_wire(message: pb.PromptLogprobs) -> PromptLogprobs:
    logprobs = tuple(map(logprobs_from_wire, message.logprobs))
    return PromptLogprobs(RequestId(message.request_id), logprobs)


def command_to_wire(command: DecodeCommand, now_s: float) -> pb.DecodeCommand:
    """A router's command as a message."""
    if isinstance(command, Reserve):
        return pb.DecodeCommand(
            reserve=pb.Reserve(
                request=request_to_wire(command.request, now_s),
                prefill_locally=command.prefill_locally,
            )
        )
    if isinstance(command, HoldRequest):
        return pb.DecodeCommand(hold=pb.WireHold(request_id=command.request_id))
    return pb.DecodeCommand(cancel=pb.WireCancel(request_id=command.request_id))


def command_from_wire(message: pb.DecodeCommand, now_s: float) -> DecodeCommand:
    """A router's command from its message."""
    if message.HasField("reserve"):
        return Reserve(
            request_from_wire(message.reserve.request, now_s), message.reserve.prefill_locally
        )
    if message.HasField("hold"):
        return HoldRequest(RequestId(message.hold.request_id))
    return CancelRequest(RequestId(message.cancel.request_id))


def update_to_wire(update: DecodeUpdate) -> pb.DecodeUpdate:
    """What a step did, as one message."""
    return pb.DecodeUpdate(
        reserved=[
            pb.Reserved(request_id=r.request_id, reservation=reservation_to_wire(r.reservation))
            for r in update.reserved
        ],
        tokens=[_token_to_wire(token) for token in update.tokens],
        failed=[
            pb.RequestFailed(request_id=f.request_id, error=errors.to_wire(f.error))
            for f in update.failed
        ],
        is_draining=update.is_draining,
        prompt_logprobs=map(_prompt_logprobs_to_wire, update.prompt_logprobs),
        held=[pb.Held(request_id=held.request_id) for held in update.held],
    )


def update_from_wire(message: pb.DecodeUpdate, clock: WorkerClock = OWN_CLOCK) -> DecodeUpdate:
    """What a step did, from its message; `clock` is the sender's."""
    return DecodeUpdate(
        reserved=tuple(
            Reserved(RequestId(r.request_id), reservation_from_wire(r.reservation))
            for r in message.reserved
        ),
        tokens=tuple(_token_from_wire(token, clock) for token in message.tokens),
        failed=tuple(
            RequestFailed(RequestId(f.request_id), errors.from_wire(f.error))
            for f in message.failed
        ),
        is_draining=message.is_draining,
        prompt_logprobs=tuple(map(_prompt_logprobs_from_wire, message.prompt_logprobs)),
        held=tuple(Held(RequestId(held.request_id)) for held in message.held),
    )


def _token_to_wire(token: NewToken) -> pb.NewToken:
    done, prefill = token.done, token.prefill
    return pb.NewToken(
        request_id=token.request_id,
        token_id=token.token_id,
        index=token.index,
        done=None
        if done is None
        else pb.DecodeDone(
            finish_reason=done.finish_reason.value,
            report=decode_report_to_wire(done.report),
            events=map(event_to_wire, done.report.events),
        ),
        prefill_times=None if prefill is None else prefill_report_to_wire(prefill),
        logprobs=None if token.logprobs is None else logprobs_to_wire(token.logprobs),
    )


def _token_from_wire(message: pb.NewToken, clock: WorkerClock) -> NewToken:
    done = None
    if message.HasField("done"):
        report = decode_report_from_wire(message.done.report)
        report = replace(report, events=events_from_wire(message.done.events, clock))
        done = DecodeDone(FinishReason(message.done.finish_reason), report)
    prefill = None
    if message.HasField("prefill_times"):
        prefill = prefill_report_from_wire(message.prefill_times, clock)
    return NewToken(
        request_id=RequestId(message.request_id),
        token_id=message.token_id,
        index=message.index,
        done=done,
        prefill=prefill,
        logprobs=logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
    )
