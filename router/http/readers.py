"""Readers of single fields: a JSON value -> a value of its own type, or a refusal with the name.

Ranges are not checked here but with the whole request (`router.request`), as for gRPC, unless a
value could not even be carried there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import InvalidRequest

Read = Callable[[str, object], object]

MAX_VALUE_CHARACTERS = 80
MAX_TOP_K = 2**32 - 1
MAX_WHOLE = 2**64 - 1
MAX_ID_DIGITS = 10


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream tells beside the text: tokens at its end, and with each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def shown(value: object) -> str:
    """A value as it may stand in an error."""
    if isinstance(value, list | dict) and len(value) > MAX_VALUE_CHARACTERS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, str):
        value = value[: MAX_VALUE_CHARACTERS + 1]
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."


@dataclass(frozen=True, slots=True, eq=False)
class Neutral:
    """Reads a field that is not served: refused unless it holds one of `values`."""

    values: tuple[object, ...]

    def __call__(self, name: str, value: object) -> None:
        """Nothing, or a refusal."""
        # True == 1 in Python, but not in JSON.
        if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values):
            return
        accepted = " or ".join(map(shown, self.values))
        hint = f"leave it out or send {accepted}" if accepted else "leave it out"
        raise InvalidRequest(name, shown(value), f"is not supported yet; {hint}")


def neutral(*values: object) -> Neutral:
    """A field that is not served, whose `values` change nothing."""
    return Neutral(values)


def ignored(name: str, value: object) -> None:
    """A field that says nothing about the answer."""


def flag(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(name, shown(value), "must be true or false")
    return value


def text(name: str, value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InvalidRequest(name, shown(value), "must be a string")
    return value


def number(name: str, value: object) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, shown(value), "must be a number")
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise InvalidRequest(name, shown(value), f"must be {-MAX_WHOLE} to {MAX_WHOLE}")
    return float(value)


def whole(name: str, value: object) -> int:
    """A whole number; 5.0 is one, too, as some languages send all numbers so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, shown(value), "must be a whole number")
    return value


def top_k(name: str, value: object) -> int:
    """How many tokens to keep: 0 keeps all, and so does -1, as for vLLM."""
    count = whole(name, value)
    if not -1 <= count <= MAX_TOP_K:
        raise InvalidRequest(name, shown(value), f"must be -1 or 0 (off) to {MAX_TOP_K}")
    return max(0, count)


def count(name: str, value: object) -> int:
    """A whole number that is not negative; whether it is too large is checked later."""
    number_ = whole(name, value)
    if not 0 <= number_ <= MAX_TOP_K:
        raise InvalidRequest(name, shown(value), f"must be 0 to {MAX_TOP_K}")
    return number_


def strings(name: str, value: object) -> tuple[str, ...]:
    """A string, or a list of them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest(name, shown(value), "must be a string or a list of strings")
    return tuple(text(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """An object whose keys are token ids in digits, as JSON wants it."""
    if not isinstance(value, dict):
        raise InvalidRequest(name, shown(value), "must be an object of token ids and numbers")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise InvalidRequest(name, shown(key), "keys must be token ids")
        pairs.append((int(key), number(f"{name}[{key}]", bias)))
    return tuple(pairs)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids."""
    if not isinstance(value, list):
        raise InvalidRequest(name, shown(value), "must be a list of token ids")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(f"{name}[{index}]", shown(token_id), "must be a token id")
    return tuple(value)


def prompt(name: str, value: object) -> str | tuple[int, ...]:
    """One prompt, text or token ids; also as the only entry of a list."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(name, shown(value), "must be a string or a list of token ids")
    if not any(isinstance(entry, str | list) for entry in value):
        return token_ids(name, value)
    if len(value) > 1:
        raise InvalidRequest(name, f"a list of {len(value)}", "one prompt is served per request")
    [only] = value
    return only if isinstance(only, str) else token_ids(name, only)
