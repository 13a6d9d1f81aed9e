"""One step of a decode worker's engine, whoever's tokens it made."""

from dataclasses import dataclass

from core.request import RequestId


@dataclass(frozen=True, slots=True)
class StepFacts:
    """When it ended, how long it took, and what was in it.

    num_history_tokens: tokens whose KV the sequences that decode read. prompts: tokens that were
    read of each request's prompt.
    """

    ended_s: float
    step_s: float
    num_sequences: int
    num_history_tokens: int
    prompts: tuple[tuple[RequestId, int], ...]
