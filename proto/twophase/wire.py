"""Public messages to core types and back; the workers' own messages are in `worker_wire`.

Nothing is validated here beyond what the types say; `router/service` refuses what it must.
"""

from core.completion import ChatMessage, Chunk, Completion
from core.errors import InvalidRequest
from core.request import (
    FinishReason,
    Logprobs,
    Priority,
    RequestId,
    Sender,
    Usage,
    WorkerName,
)
from core.sampling import Constraint, ConstraintKind, Sampling
from core.timeline import Phases, TransferReport
from twophase.report_wire import decode_report_from_wire, decode_report_to_wire
from twophase.v1 import inference_pb2 as pb

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_REASONS_BACK = {value: key for key, value in _FINISH_REASONS.items()}


def chat_messages_to_wire(messages: list[ChatMessage]) -> pb.ChatMessages:
    """A conversation as a message."""
    return pb.ChatMessages(
        messages=[pb.ChatMessage(role=m.role, content=m.content) for m in messages]
    )


def chat_messages_from_wire(messages: pb.ChatMessages) -> list[ChatMessage]:
    """A conversation from its message."""
    return [ChatMessage(m.role, m.content) for m in messages.messages]


_OPTIONAL_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_tokens",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "num_logprobs",
    "n",
    "num_prompt_logprobs",
)


def constraint_to_wire(constraint: Constraint | None) -> pb.Constraint | None:
    """A constraint as a message."""
    return None if constraint is None else pb.Constraint(**{constraint.kind.value: constraint.text})


def constraint_from_wire(message: pb.Constraint) -> Constraint | None:
    """A constraint from its message; None when none is set."""
    kind = message.WhichOneof("kind")
    return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


def sampling_to_wire(sampling: Sampling) -> pb.SamplingParams:
    """What a user asked, as a message; raises ValueError for a number that no field can hold."""
    message = pb.SamplingParams(
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        logit_bias=[pb.LogitBias(token_id=i, bias=bias) for i, bias in sampling.logit_bias],
        constraint=constraint_to_wire(sampling.constraint),
    )
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_wire(message: pb.SamplingParams) -> Sampling:
    """What a user asked, from its message."""
    given = {n: getattr(message, n) for n in _OPTIONAL_SAMPLING if message.HasField(n)}
    return Sampling(
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        constraint=constraint_from_wire(message.constraint),
        **given,
    )


_PRIORITIES = {
    Priority.HIGH: pb.PRIORITY_HIGH,
    Priority.NORMAL: pb.PRIORITY_NORMAL,
    Priority.LOW: pb.PRIORITY_LOW,
}
_PRIORITIES_BACK = {value: key for key, value in _PRIORITIES.items()} | {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL
}


def put_sender(sender: Sender, message: pb.GenerateRequest) -> None:
    """Write on whose behalf a request comes into its message."""
    message.session, message.user = sender.session, sender.client
    message.priority = _PRIORITIES[sender.priority]


def sender_from_wire(message: pb.GenerateRequest) -> Sender:
    """On whose behalf a request comes; raises InvalidRequest for a priority that is none."""
    priority = _PRIORITIES_BACK.get(message.priority)
    if priority is None:
        known = ", ".join(pb.Priority.keys())
        raise InvalidRequest("priority", message.priority, f"must be one of {known}")
    return Sender(message.user, message.session, priority)


def logprobs_to_wire(logprobs: Logprobs) -> pb.Logprobs:
    """Log-probabilities of one position as a message."""
    top = [pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in logprobs.top]
    return pb.Logprobs(chosen=logprobs.chosen, top=top)


def logprobs_from_wire(message: pb.Logprobs) -> Logprobs:
    """Log-probabilities of one position from their message."""
    return Logprobs(message.chosen, tuple((t.token_id, t.logprob) for t in message.top))


def chunk_to_wire(chunk: Chunk) -> pb.GenerateResponse:
    """One streamed message."""
    completion = completion_to_wire(chunk.completion) if chunk.completion else None
    return pb.GenerateResponse(
        text=chunk.text,
        token_ids=chunk.token_ids,
        completion=completion,
        logprobs=[logprobs_to_wire(logprobs) for logprobs in chunk.logprobs],
        index=chunk.index,
        prompt_logprobs=map(logprobs_to_wire, chunk.prompt_logprobs),
        seed=chunk.seed,
    )


def chunk_from_wire(message: pb.GenerateResponse) -> Chunk:
    """One streamed message, as the client sees it."""
    completion = (
        completion_from_wire(message.completion) if message.HasField("completion") else None
    )
    return Chunk(
        message.text,
        tuple(message.token_ids),
        completion,
        tuple(map(logprobs_from_wire, message.logprobs)),
        seed=message.seed if message.HasField("seed") else None,
        index=message.index,
        prompt_logprobs=tuple(map(logprobs_from_wire, message.prompt_logprobs)),
    )


def completion_to_wire(completion: Completion) -> pb.Completion:
    """The closing record as a message."""
    transfer = completion.transfer
    return pb.Completion(
        request_id=completion.request_id,
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        usage=pb.Usage(
            num_prompt_tokens=completion.usage.num_prompt_tokens,
            num_output_tokens=completion.usage.num_output_tokens,
            num_prefill_cached_tokens=completion.usage.num_prefill_cached_tokens,
            num_decode_cached_tokens=completion.usage.num_decode_cached_tokens,
            num_transferred_tokens=completion.usage.num_transferred_tokens,
            num_local_prefill_tokens=completion.usage.num_local_prefill_tokens,
        ),
        phases=_phases_to_wire(completion.phases),
        transfer=None
        if transfer is None
        else pb.Transfer(
            backend=transfer.backend,
            num_bytes=transfer.num_bytes,
            num_pieces=transfer.num_pieces,
            push_s=transfer.push_s,
            exposed_s=transfer.exposed_s,
        ),
        prefill_worker=completion.prefill_worker,
        decode_worker=completion.decode_worker,
        placement=completion.placement,
        seed=completion.seed,
        failures=completion.failures,
        decode=None if completion.decode is None else decode_report_to_wire(completion.decode),
        num_resumed_tokens=completion.num_resumed_tokens,
    )


def completion_from_wire(message: pb.Completion) -> Completion:
    """The closing record from its message."""
    usage, transfer = message.usage, message.transfer
    return Completion(
        request_id=RequestId(message.request_id),
        finish_reason=_FINISH_REASONS_BACK[message.finish_reason],
        usage=Usage(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_output_tokens=usage.num_output_tokens,
            num_prefill_cached_tokens=usage.num_prefill_cached_tokens,
            num_decode_cached_tokens=usage.num_decode_cached_tokens,
            num_transferred_tokens=usage.num_transferred_tokens,
            num_local_prefill_tokens=usage.num_local_prefill_tokens,
        ),
        phases=_phases_from_wire(message.phases),
        transfer=TransferReport(
            backend=transfer.backend,
            num_bytes=transfer.num_bytes,
            num_pieces=transfer.num_pieces,
            push_s=transfer.push_s,
            exposed_s=transfer.exposed_s,
        )
        if message.HasField("transfer")
        else None,
        prefill_worker=WorkerName(message.prefill_worker),
        decode_worker=WorkerName(message.decode_worker),
        placement=message.placement,
        seed=message.seed,
        failures=tuple(message.failures),
        decode=decode_report_from_wire(message.decode) if message.HasField("decode") else None,
        num_resumed_tokens=message.num_resumed_tokens,
    )


def _phases_to_wire(phases: Phases) -> pb.Phases:
    return pb.Phases(
        tokenize_s=phases.tokenize_s,
        place_s=phases.place_s,
        recovery_s=phases.recovery_s,
        reserve_s=phases.reserve_s,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        exposed_transfer_s=phases.exposed_transfer_s,
        slot_wait_s=phases.slot_wait_s,
        decode_s=phases.decode_s,
        delivery_s=phases.delivery_s,
        unaccounted_s=phases.unaccounted_s,
        total_s=phases.total_s,
        time_to_first_token_s=phases.time_to_first_token_s,
    )


def _phases_from_wire(message: pb.Phases) -> Phases:
    return Phases(
        tokenize_s=message.tokenize_s,
        place_s=message.place_s,
        recovery_s=message.recovery_s,
        reserve_s=message.reserve_s,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        exposed_transfer_s=message.exposed_transfer_s,
        slot_wait_s=message.slot_wait_s,
        decode_s=message.decode_s,
        delivery_s=message.delivery_s,
        total_s=message.total_s,
        time_to_first_token_s=message.time_to_first_token_s,
    )
