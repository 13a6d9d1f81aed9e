"""What a user asked for, and how it ended."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NewType

import xxhash

from core.errors import InvalidRequest

RequestId = NewType("RequestId", str)
WorkerName = NewType("WorkerName", str)

DEFAULT_MAX_TOKENS = 256
# Of one user; the checkpoint's own come on top.
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_REQUEST_ID_LENGTH = 128
PROBE_ID = "readiness-probe-"
# Parts the id of a request from the number of a further attempt; no user's id holds it.
ATTEMPT_MARK = "~"


def attempt_id(request_id: RequestId, attempt: int, mark: str = "") -> RequestId:
    """What workers call the `attempt`-th try of a request, from 1: its own id, then `id~2`, ...

    With a `mark`, which a request has whose id a client chose, `id~mark1`, `id~mark2`, ...
    """
    if attempt == 1 and not mark:
        return request_id
    return RequestId(f"{request_id}{ATTEMPT_MARK}{mark}{attempt}")


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client has of an answer that another router began, in order; perhaps nothing yet."""

    token_ids: tuple[int, ...]


def answer_id(request_id: RequestId, index: int) -> RequestId:
    """What workers call the index-th of n answers, from 0: the request's id, then `id~n1`, ..."""
    return request_id if index == 0 else RequestId(f"{request_id}{ATTEMPT_MARK}n{index}")


def is_further_answer(request_id: RequestId) -> bool:
    """Whether an id of `answer_id` is of another answer than the first."""
    return f"{ATTEMPT_MARK}n" in request_id


def id_of_attempt(request_id: RequestId) -> RequestId:
    """The request that an id of `attempt_id` or `answer_id` belongs to."""
    return RequestId(request_id.partition(ATTEMPT_MARK)[0])


class FinishReason(StrEnum):
    """Why a request has no further tokens; ERROR stands in records of requests that failed."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 keep the whole vocabulary; min_p drops
    tokens below that share of the likeliest one's probability. The draw for the token at absolute
    position p depends on (seed, p) alone, so a moved or re-batched request draws what it would
    have drawn. stop_token_ids include the checkpoint's end-of-sequence ids unless the user asked
    to ignore them; the token that stops a request is part of its output.

    Before that, logits are changed: logit_bias is added; stop tokens are ruled out while fewer
    than min_tokens tokens were made; repetition_penalty divides positive and multiplies negative
    logits of tokens that occur in prompt or answer (Keskar et al. 2019, CTRL, s.4.1);
    presence_penalty, and frequency_penalty for each time, is taken off those in the answer.

    A grammar (llguidance's own form, which every Constraint becomes) rules out every token after
    which the answer's text could not match any more; where it is complete, only the end is left.

    num_logprobs None asks for none; otherwise each token comes with its log-probability under the
    model's own distribution (no temperature, no penalty) and those of so many likeliest tokens.
    num_prompt_logprobs asks the same of each prompt token but the first.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: str | None = None
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the documented ranges with field, value and limit."""
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        _require(0.0 <= self.temperature <= 2.0, "temperature", self.temperature, "must be 0 to 2")
        _require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "must be over 0 and at most 1")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"must be 0 to {MAX_SEED}")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS,
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            f"at most {MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS} are taken",
        )
        self._check_logits()

    def _check_logits(self) -> None:
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must be 0 or more")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "must be 0 to 1")
        penalty = self.repetition_penalty
        _require(0.0 < penalty <= 10.0, "repetition_penalty", penalty, "must be over 0, at most 10")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "must be -2 to 2")
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIASES,
            "logit_bias",
            f"{len(self.logit_bias)} ids",
            f"at most {MAX_LOGIT_BIASES} are taken",
        )
        for token_id, bias in self.logit_bias:
            _require(
                -100.0 <= bias <= 100.0, f"logit_bias[{token_id}]", bias, "must be -100 to 100"
            )
        limit = f"must be 0 to {MAX_LOGPROBS}"
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, limit)

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on which tokens came before, beside through the model."""
        return (
            self.grammar is not None
            or self.min_tokens > 0
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _require(fact: bool, name: str, value: object, limit: str) -> None:
    if not fact:
        raise InvalidRequest(name, value, limit)


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n answers: far from that of any other answer or seed."""
    return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed=seed) & MAX_SEED


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at one position: of the token that was chosen, and the likeliest.

    top holds (token id, log-probability), likeliest first; as many as were asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One token of an answer; logprobs when they were asked for."""

    token_id: int
    logprobs: Logprobs | None = None


class Priority(IntEnum):
    """Who goes first among requests that wait at the router; the lowest number does."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class Sender:
    """On whose behalf a request comes: only the router cares, workers are not told.

    client is whom it shares fairly with others; requests of one session like the same workers.
    Empty where nobody said.
    """

    client: str = ""
    session: str = ""
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Request:
    """One validated generation: token ids in, an absolute deadline, how to sample.

    deadline_s is monotonic seconds of the process that holds the object; on the wire it travels
    as the seconds that remain. The last num_resumed_tokens of the prompt were made by earlier
    attempts: penalties count them as part of the answer. resumption is set where the client goes on
    with an answer; like the sender it concerns the router alone. A client may use its id again,
    even at another router, while workers still end what had that id before: `mark` keeps them
    apart. trace_id, 32 hexadecimal digits or empty, is for those who read logs.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    num_resumed_tokens: int = 0
    sender: Sender = Sender()
    resumption: Resumption | None = None
    mark: str = ""
    trace_id: str = ""

    @property
    def log_name(self) -> str:
        """How log lines name it: its id, and the trace that it belongs to."""
        return log_name(self.request_id, self.trace_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def prompt_digest(self) -> int:
        """XXH3-64 of the prompt's tokens, hence of their number, too: equal on every host."""
        token_ids = array("I", self.prompt_token_ids)
        if sys.byteorder == "big":
            token_ids.byteswap()
        return xxhash.xxh3_64_intdigest(token_ids.tobytes())

    @property
    def max_num_tokens(self) -> int:
        """Prompt and answer at their longest."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    def resumed(self, output_token_ids: Sequence[int], attempt: int) -> "Request":
        """The rest of this request as its `attempt`-th try: what was emitted joins the prompt.

        Positions, and so seeded draws, stay as they were. At least one token must be missing. What
        is told of the prompt came before the first token.
        """
        sampling = self.sampling
        num_missing = sampling.max_tokens - len(output_token_ids)
        num_prompt_logprobs = None if output_token_ids else sampling.num_prompt_logprobs
        return Request(
            request_id=attempt_id(self.request_id, attempt, self.mark),
            prompt_token_ids=(*self.prompt_token_ids, *output_token_ids),
            sampling=replace(
                sampling, max_tokens=num_missing, num_prompt_logprobs=num_prompt_logprobs
            ),
            deadline_s=self.deadline_s,
            num_resumed_tokens=len(output_token_ids),
            trace_id=self.trace_id,
        )

    def answer(self, index: int) -> "Request":
        """What the index-th of n answers asks of workers; answer 0 is this request itself."""
        if index == 0:
            return self
        seed = derived_seed(self.sampling.seed, index)
        # The prompt is the same for all: answer 0 tells of it.
        sampling = replace(self.sampling, seed=seed, num_prompt_logprobs=None)
        return replace(self, request_id=answer_id(self.request_id, index), sampling=sampling)

    @property
    def cacheable_token_ids(self) -> tuple[int, ...]:
        """Prompt tokens that a worker which reads the prompt may take from its prefix cache.

        Empty where log-probabilities of the prompt are wanted: they come with computing it.
        """
        return () if self.is_scored else self.prompt_token_ids

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.sampling.num_prompt_logprobs is not None

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """What follows the prompt tokens [start, end) in the prompt, if that is to be told of."""
        return self.prompt_token_ids[start + 1 : end + 1] if self.is_scored else ()

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Why `token_id`, the `num_output_tokens`-th of the answer, is the last; None if not."""
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    num_prefill_cached_tokens of the prompt were found in the prefilling worker's prefix cache. The
    last three say where decode's KV cache of the prompt came from: its own prefix cache, a
    handoff, or a prefill at the decode worker itself. They add up to the prompt, or are all zero
    when the answer was complete with its first token and decode needed no KV cache.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_prefill_cached_tokens: int = 0
    num_decode_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_local_prefill_tokens: int = 0


def log_name(request_id: str, trace_id: str) -> str:
    """How every log line names a request."""
    return f"{request_id} (trace {trace_id})" if trace_id else request_id
