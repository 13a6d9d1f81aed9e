"""Every field that a body may hold, one line each, and how it is read.

`TEXT` is POST /v1/completions, `CHAT` is POST /v1/chat/completions. Three kinds of lines:

taken       a reader of its own: name and value -> what `body` makes of it, or a refusal
neutral     known to OpenAI or vLLM, not served yet: only values that change nothing are accepted
ignored     says nothing about the answer

To serve a neutral field, give it a reader in `readers` and a use in `body`. null means left out.
"""

import difflib
from collections.abc import Mapping

from core.completion import ChatMessage
from core.errors import InvalidRequest
from router.http.constraints import response_format, structured_outputs
from router.http.errors import BODY
from router.http.readers import (
    Read,
    StreamOptions,
    count,
    flag,
    ignored,
    logit_bias,
    neutral,
    number,
    prompt,
    shown,
    strings,
    text,
    token_ids,
    top_k,
    whole,
)

# Longer names are no misspellings, and costly to compare.
MAX_COMPARED_CHARACTERS = 64


def read_object(name: str, value: object, table: Mapping[str, Read]) -> dict[str, object]:
    """The fields of a JSON object, each by its reader; those that are null are left out.

    Raises:
        InvalidRequest: on the first field that is unknown or that its reader refuses.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(name, shown(value), "must be an object")
    prefix = "" if name == BODY else f"{name}."
    found = {}
    for key, content in value.items():
        if key not in table:
            raise _unknown(prefix, key, table)
        if content is not None:
            found[key] = table[key](f"{prefix}{key}", content)
    return found


def _unknown(prefix: str, key: str, table: Mapping[str, Read]) -> InvalidRequest:
    near = key if len(key) <= MAX_COMPARED_CHARACTERS else ""
    nearest = difflib.get_close_matches(near, table, n=1)
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else "no field is called so"
    return InvalidRequest(f"{prefix}{key[:MAX_COMPARED_CHARACTERS]}", "unknown", hint)


def _messages(name: str, value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(name, shown(value), "must be a list of messages")
    return tuple(_message(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def _message(name: str, value: object) -> ChatMessage:
    found = read_object(name, value, MESSAGE)
    role, content = found.get("role"), found.get("content")
    if not isinstance(role, str):
        raise InvalidRequest(f"{name}.role", "unset", "every message has a role")
    if not isinstance(content, str):
        raise InvalidRequest(f"{name}.content", "unset", "every message has text")
    return ChatMessage(role, content)


def _content(name: str, value: object) -> str:
    """Text, or parts of text, which are joined as vLLM joins them: one per line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(name, shown(value), "must be a string or a list of text parts")
    return "\n".join(_part(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def _part(name: str, value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{name}.type", shown(kind), "only text parts are supported")
    part = read_object(name, value, PART).get("text")
    if not isinstance(part, str):
        raise InvalidRequest(f"{name}.text", "unset", "every text part has text")
    return part


def _stream_options(name: str, value: object) -> StreamOptions:
    found = read_object(name, value, STREAM_OPTIONS)
    return StreamOptions(
        include_usage=found.get("include_usage") is True,
        continuous_usage_stats=found.get("continuous_usage_stats") is True,
    )


_BOTH: dict[str, Read] = {
    # Taken.
    "model": text,
    "max_tokens": whole,
    "temperature": number,
    "top_p": number,
    "seed": whole,
    "n": whole,
    "stop": strings,
    "presence_penalty": number,
    "frequency_penalty": number,
    "logit_bias": logit_bias,
    "response_format": response_format,
    "stream": flag,
    "stream_options": _stream_options,
    # Taken; vLLM's extensions.
    "top_k": top_k,
    "min_p": number,
    "min_tokens": count,
    "repetition_penalty": number,
    "structured_outputs": structured_outputs,
    "ignore_eos": flag,
    "stop_token_ids": token_ids,
    "return_token_ids": flag,
    # Taken for placement and fairness.
    "user": text,
    "priority": whole,
    # Neutral; vLLM's extensions.
    "length_penalty": neutral(1),
    "use_beam_search": neutral(False),
    "include_stop_str_in_output": neutral(False),
    "skip_special_tokens": neutral(True),
    "spaces_between_special_tokens": neutral(True),
    "truncate_prompt_tokens": neutral(),
    "allowed_token_ids": neutral(),
    "bad_words": neutral([]),
    "prompt_logprobs": neutral(),
    "request_id": neutral(),
    "session_id": neutral(),
    "cache_salt": neutral(),
    "kv_transfer_params": neutral(),
}

TEXT: dict[str, Read] = _BOTH | {
    "prompt": prompt,
    "best_of": neutral(1),
    "echo": flag,
    "logprobs": count,
    "suffix": neutral(""),
    "add_special_tokens": neutral(True),
}

CHAT: dict[str, Read] = _BOTH | {
    "messages": _messages,
    "max_completion_tokens": whole,
    "prompt_cache_key": text,
    "logprobs": flag,
    "top_logprobs": count,
    # Ignored: bookkeeping of OpenAI's own service.
    "metadata": ignored,
    "prompt_cache_options": ignored,
    "prompt_cache_retention": ignored,
    "safety_identifier": ignored,
    # Ignored: without tools it says nothing.
    "parallel_tool_calls": ignored,
    # Neutral.
    "tools": neutral([]),
    "tool_choice": neutral("none", "auto"),
    "functions": neutral([]),
    "function_call": neutral("none", "auto"),
    "modalities": neutral(["text"]),
    "audio": neutral(),
    "prediction": neutral(),
    "moderation": neutral(),
    "reasoning_effort": neutral("none"),
    "verbosity": neutral("medium"),
    "service_tier": neutral("auto", "default"),
    "store": neutral(False),
    "web_search_options": neutral(),
    # Neutral; vLLM's extensions.
    "echo": neutral(False),
    "add_generation_prompt": neutral(True),
    "continue_final_message": neutral(False),
    "add_special_tokens": neutral(False),
    "chat_template": neutral(),
    "chat_template_kwargs": neutral({}),
    "documents": neutral([]),
    "mm_processor_kwargs": neutral({}),
}

MESSAGE: dict[str, Read] = {
    "role": text,
    "content": _content,
    "name": neutral(),
    "refusal": neutral(),
    "annotations": neutral([]),
    "audio": neutral(),
    "tool_calls": neutral([]),
    "tool_call_id": neutral(),
    "function_call": neutral(),
    "reasoning": neutral(),
    "reasoning_content": neutral(),
}

PART: dict[str, Read] = {"type": text, "text": text}

STREAM_OPTIONS: dict[str, Read] = {
    "include_usage": flag,
    "continuous_usage_stats": flag,
    # Padding against guesses from the length of encrypted events.
    "include_obfuscation": neutral(False),
}
