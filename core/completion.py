"""How a request ended: the record that closes every stream and every log line."""

from dataclasses import dataclass

from core.request import FinishReason, Logprobs, RequestId, Usage, WorkerName
from core.timeline import DecodeReport, Phases, TransferReport


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    prefill_worker equals decode_worker, and transfer is None, when no KV cache was moved; it is a
    decode worker that stopped where that shipped the answer so far.
    placement says in words why these workers were chosen; failures, one sentence each, which
    attempts before this one failed. decode is None where the answer was complete without decode, or
    ended by a stop string. The first num_resumed_tokens of the answer were there before the attempt
    whose prefill and decode are told.
    """

    request_id: RequestId
    finish_reason: FinishReason
    usage: Usage
    phases: Phases
    transfer: TransferReport | None
    prefill_worker: WorkerName
    decode_worker: WorkerName
    placement: str
    seed: int
    failures: tuple[str, ...] = ()
    decode: DecodeReport | None = None
    num_resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of an answer; `completion` comes with the last one only.

    logprobs, when they were asked for, has one entry for each of token_ids. seed, the one in force,
    comes with the first message of an answer only. index tells which of the n answers to a request
    this is of. prompt_logprobs, of answer 0 and before its first token, have together one entry for
    each prompt token from the second on.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[Logprobs, ...] = ()
    index: int = 0
    prompt_logprobs: tuple[Logprobs, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, as the chat template knows it."""

    role: str
    content: str
