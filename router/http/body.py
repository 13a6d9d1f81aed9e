"""The bytes of a body -> what is asked, in core types.

What comes out is unpacked, not validated: ranges and limits are checked with the request itself.
Pure; reads no socket.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pydantic_core

from core.errors import InvalidRequest
from core.request import Priority, Sender
from core.sampling import Constraint, ConstraintKind, Sampling
from router.http.errors import BODY
from router.http.fields import CHAT, TEXT, read_object
from router.http.readers import StreamOptions
from router.request import Defaults, Prompt

# What OpenAI documents for /v1/completions; a chat takes the router's own default.
TEXT_MAX_TOKENS = 16


class Kind(Enum):
    """Which of the two endpoints was called."""

    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Body:
    """One body.

    names maps the router's names of fields to those that this client used.
    """

    model: str
    prompt: Prompt
    asked: Sampling
    is_stream: bool
    stream_options: StreamOptions
    return_token_ids: bool
    echo: bool
    sender: Sender
    names: Mapping[str, str]


def read_body(data: bytes, kind: Kind) -> Body:
    """What `data` asks for.

    Raises:
        InvalidRequest: it is no JSON, or a field is unknown, not supported or of a wrong type.
    """
    try:
        # No lone surrogates, and nesting is bounded.
        tree = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(BODY, "not JSON in UTF-8", str(error)) from error
    # Any: each field has the type of its reader.
    found: dict[str, Any] = read_object(BODY, tree, TEXT if kind is Kind.TEXT else CHAT)
    field = "prompt" if kind is Kind.TEXT else "messages"
    if field not in found:
        raise InvalidRequest(field, "unset", "is required")
    is_stream = found.get("stream", False)
    if "stream_options" in found and not is_stream:
        raise InvalidRequest("stream_options", "set", "is for streams: set stream to true")
    max_tokens = _max_tokens_field(found)
    num_logprobs, echo = _num_logprobs(found), kind is Kind.TEXT and found.get("echo", False)
    return Body(
        model=found.get("model", ""),
        prompt=found[field],
        asked=Sampling(
            max_tokens=found.get(max_tokens),
            temperature=found.get("temperature"),
            top_k=found.get("top_k"),
            top_p=found.get("top_p"),
            seed=found.get("seed"),
            stop_token_ids=found.get("stop_token_ids", ()),
            ignore_eos=found.get("ignore_eos", False),
            stop=found.get("stop", ()),
            min_tokens=found.get("min_tokens"),
            min_p=found.get("min_p"),
            repetition_penalty=found.get("repetition_penalty"),
            presence_penalty=found.get("presence_penalty"),
            frequency_penalty=found.get("frequency_penalty"),
            logit_bias=found.get("logit_bias", ()),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_logprobs if echo else None,
            constraint=_constraint(found),
            n=found.get("n"),
        ),
        is_stream=is_stream,
        stream_options=found.get("stream_options", StreamOptions()),
        return_token_ids=found.get("return_token_ids", False),
        echo=echo,
        sender=_sender(found),
        names={
            "prompt": field,
            "prompt_token_ids": field,
            "max_tokens": max_tokens,
            "num_logprobs": "logprobs" if kind is Kind.TEXT else "top_logprobs",
            "num_prompt_logprobs": "logprobs",
            **dict.fromkeys(
                (f"constraint.{kind}" for kind in ConstraintKind),
                "structured_outputs" if "structured_outputs" in found else "response_format",
            ),
        },
    )


def defaults_of(kind: Kind, checkpoint: Defaults) -> Defaults:
    """What unset fields mean at this endpoint."""
    return replace(checkpoint, max_tokens=TEXT_MAX_TOKENS) if kind is Kind.TEXT else checkpoint


def _sender(found: Mapping[str, Any]) -> Sender:
    """Whom it is for: OpenAI's user and prompt_cache_key, and vLLM's priority, low ones first."""
    user, asked = found.get("user", ""), found.get("priority", 0)
    priority = Priority.HIGH if asked < 0 else Priority.LOW if asked > 0 else Priority.NORMAL
    return Sender(user, found.get("prompt_cache_key", user), priority)


def _num_logprobs(found: Mapping[str, Any]) -> int | None:
    """A text asks for a number of alternatives, a chat for logprobs and for alternatives."""
    asked, num_top = found.get("logprobs"), found.get("top_logprobs")
    if not isinstance(asked, bool | None):
        assert isinstance(asked, int)
        return asked
    if num_top and not asked:
        raise InvalidRequest("top_logprobs", num_top, "set logprobs to true, too")
    return int(num_top or 0) if asked else None


def _constraint(found: Mapping[str, Any]) -> Constraint | None:
    """OpenAI's response_format, or vLLM's structured_outputs."""
    ours, theirs = found.get("response_format"), found.get("structured_outputs")
    if ours is not None and theirs is not None:
        raise InvalidRequest("structured_outputs", "set", "response_format is set as well")
    constraint = ours or theirs
    assert isinstance(constraint, Constraint | None)
    return constraint


def _max_tokens_field(found: Mapping[str, object]) -> str:
    """Which of the two names the client used; OpenAI has renamed the field for chats."""
    old, new = "max_tokens", "max_completion_tokens"
    if new not in found:
        return old
    if found.get(old, found[new]) != found[new]:
        raise InvalidRequest(old, found[old], f"{new} is {found[new]}: send one of them")
    return new
