"""What a user asked of sampling, before anybody filled in defaults or checked it."""

from dataclasses import dataclass
from enum import StrEnum


class ConstraintKind(StrEnum):
    """How a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer's text must match as a whole."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; None takes the server's default.

    Ranges and meanings stand at SamplingParams in `inference.proto`.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    constraint: Constraint | None = None
    n: int | None = None
    num_prompt_logprobs: int | None = None
