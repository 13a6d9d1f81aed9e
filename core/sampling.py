"""What a user asked of sampling, before anybody filled in defaults or checked it."""

from dataclasses import dataclass


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
