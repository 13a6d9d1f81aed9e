"""From a request's fields to a validated Request: every refusal names field, value, limit.

Pure but for the tokenizer. Knows no message types: `service` and `http` unpack them.
"""

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from core.completion import ChatMessage
from core.errors import InvalidRequest, PromptTooLong
from core.request import (
    ATTEMPT_MARK,
    DEFAULT_MAX_TOKENS,
    MAX_REQUEST_ID_LENGTH,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    PROBE_ID,
    RequestId,
    Resumption,
    SamplingParams,
    Sender,
)
from core.sampling import Sampling
from router.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
# Characters of a client or session.
MAX_NAME = 128

Number = TypeVar("Number", int, float)
Prompt = str | Sequence[ChatMessage] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What sampling fields mean that the client left unset."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cluster can serve: the longest prompt, and the longest prompt and answer.

    max_prompt_tokens None: whatever leaves room for one token of answer.
    """

    model: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int | None = None

    @property
    def most_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token of answer."""
        room = self.max_context_tokens - 1
        return room if self.max_prompt_tokens is None else min(self.max_prompt_tokens, room)


def request_id_of(text: str) -> RequestId:
    """The client's id, checked; a new one if it gave none."""
    if len(text) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(
            "request_id", f"{len(text)} characters", f"at most {MAX_REQUEST_ID_LENGTH} are taken"
        )
    if not text.isprintable():
        raise InvalidRequest("request_id", repr(text), "must be printable")
    if text.startswith(PROBE_ID):
        raise InvalidRequest("request_id", text, f"must not begin with {PROBE_ID}")
    if ATTEMPT_MARK in text:
        raise InvalidRequest("request_id", text, f"must not contain {ATTEMPT_MARK}")
    return RequestId(text or uuid.uuid4().hex)


def mark_of(text: str) -> str:
    """What tells this use of the id that a client gave from any other; empty if it gave none."""
    return f"{secrets.token_hex(4)}-" if text else ""


def checked_sender(sender: Sender) -> Sender:
    """On whose behalf a request comes, if its names are short enough."""
    for field, name in (("session", sender.session), ("user", sender.client)):
        if len(name) > MAX_NAME:
            limit = f"at most {MAX_NAME} are taken"
            raise InvalidRequest(field, f"{len(name)} characters", limit)
    return sender


def check_model(model: str, limits: Limits) -> None:
    """Refuse a model that is not served; empty means the one that is."""
    if model and model != limits.model:
        raise InvalidRequest("model", model, f"this cluster serves {limits.model}")


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    """The prompt's token ids; leaves room for at least one token of answer.

    Contract: may take half a second per megabyte of text; thread-safe.
    """
    most = limits.most_prompt_tokens
    if isinstance(prompt, str):
        _require_fits(tokenizer.fewest_tokens(prompt), most)
        token_ids = tokenizer.encode(prompt)
    else:
        messages = [part for part in prompt if isinstance(part, ChatMessage)]
        if messages:
            content = "".join(message.content for message in messages)
            _require_fits(tokenizer.fewest_tokens(content), most)
            token_ids = tokenizer.encode_chat(messages)
        else:
            token_ids = tuple(part for part in prompt if not isinstance(part, ChatMessage))
            _check_token_ids("prompt_token_ids", token_ids, limits)
    if not token_ids:
        raise InvalidRequest("prompt", "empty", "must hold at least one token")
    _require_fits(len(token_ids), most)
    return token_ids


def sampling_of(
    asked: Sampling,
    num_prompt_tokens: int,
    eos_token_ids: tuple[int, ...],
    limits: Limits,
    *,
    defaults: Defaults = Defaults(),
    grammar: str | None = None,
) -> SamplingParams:
    """Sampling parameters with every default filled in; `grammar` is what asked.constraint became.

    Raises:
        InvalidRequest: a value is out of its range, or prompt and answer exceed the context.
    """
    room = limits.max_context_tokens - num_prompt_tokens
    max_tokens = min(defaults.max_tokens, room) if asked.max_tokens is None else asked.max_tokens
    if max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            max_tokens,
            f"a prompt of {num_prompt_tokens} tokens leaves {room} of a context of "
            f"{limits.max_context_tokens}",
        )
    min_tokens = _or(asked.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", min_tokens, f"max_tokens is {max_tokens}")
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids",
            f"{len(asked.stop_token_ids)} ids",
            f"at most {MAX_STOP_TOKEN_IDS} are taken",
        )
    _check_token_ids("stop_token_ids", asked.stop_token_ids, limits)
    _check_token_ids("logit_bias", tuple(token_id for token_id, _ in asked.logit_bias), limits)
    stops = asked.stop_token_ids if asked.ignore_eos else (*eos_token_ids, *asked.stop_token_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(asked.temperature, defaults.temperature),
        top_k=_or(asked.top_k, defaults.top_k),
        top_p=_or(asked.top_p, defaults.top_p),
        seed=secrets.randbelow(MAX_SEED) if asked.seed is None else asked.seed,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        min_tokens=min_tokens,
        min_p=_or(asked.min_p, 0.0),
        repetition_penalty=_or(asked.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(asked.presence_penalty, 0.0),
        frequency_penalty=_or(asked.frequency_penalty, 0.0),
        logit_bias=asked.logit_bias,
        num_logprobs=asked.num_logprobs,
        num_prompt_logprobs=asked.num_prompt_logprobs,
        grammar=grammar,
    )


def num_answers_of(asked: Sampling, most: int) -> int:
    """How many answers are asked for, checked."""
    num_answers = _or(asked.n, 1)
    if not 1 <= num_answers <= most:
        raise InvalidRequest("n", num_answers, f"must be 1 to {most}")
    return num_answers


def stop_strings_of(asked: Sampling) -> tuple[str, ...]:
    """The strings that end the answer, checked."""
    if len(asked.stop) > MAX_STOP_STRINGS:
        limit = f"at most {MAX_STOP_STRINGS} are taken"
        raise InvalidRequest("stop", f"{len(asked.stop)} strings", limit)
    for index, stop in enumerate(asked.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            limit = f"must have 1 to {MAX_STOP_CHARACTERS}"
            raise InvalidRequest(f"stop[{index}]", f"{len(stop)} characters", limit)
    return tuple(dict.fromkeys(asked.stop))


def resumption_of(
    token_ids: tuple[int, ...] | None, asked: Sampling, sampling: SamplingParams, limits: Limits
) -> Resumption | None:
    """The part of the answer that the client has, checked; None for a new answer."""
    if token_ids is None:
        return None
    if (asked.n or 1) > 1:
        raise InvalidRequest("resumption", "set", "goes on with one answer alone: n must be 1")
    name = "resumption.token_ids"
    if len(token_ids) > sampling.max_tokens:
        limit = f"max_tokens is {sampling.max_tokens}"
        raise InvalidRequest(name, f"{len(token_ids)} ids", limit)
    _check_token_ids(name, token_ids, limits)
    for index, token_id in enumerate(token_ids[:-1]):
        if token_id in sampling.stop_token_ids:
            raise InvalidRequest(f"{name}[{index}]", token_id, "the answer ends with this token")
    return Resumption(token_ids)


def check_output_ids(token_ids: Sequence[int], limits: Limits) -> None:
    """Refuse what cannot be the tokens of an answer."""
    if len(token_ids) > limits.max_context_tokens:
        limit = f"at most {limits.max_context_tokens} fit the context"
        raise InvalidRequest("token_ids", f"{len(token_ids)} ids", limit)
    _check_token_ids("token_ids", token_ids, limits)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _require_fits(num_tokens: int, most: int) -> None:
    if num_tokens > most:
        raise PromptTooLong(
            "prompt", f"{num_tokens} tokens or more", f"at most {most} fit the context"
        )


def _check_token_ids(name: str, token_ids: Sequence[int], limits: Limits) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(f"{name}[{index}]", token_id, f"must be below {limits.vocab_size}")
