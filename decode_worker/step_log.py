"""The last steps of a decode worker: when, how long, and what was in them.

Pure: facts in; the newest are kept.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice, takewhile

from core.request import RequestId

# Steps that are remembered; a gap over more of them names only the last.
MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of the engine: when, how long, and what was in it.

    num_history_tokens: tokens whose KV the sequences that decode read. prompts: tokens that were
    read of each request's prompt.
    """

    ended_s: float
    step_s: float
    num_sequences: int
    num_history_tokens: int
    prompts: tuple[tuple[RequestId, int], ...]


class StepLog:
    """The last steps, newest last."""

    def __init__(self) -> None:
        self._steps: deque[StepFacts] = deque(maxlen=MAX_STEPS)
        self._prompt_read_s = float("-inf")

    def add(self, step: StepFacts) -> None:
        """A step ended."""
        self._steps.append(step)
        if step.prompts:
            self._prompt_read_s = step.ended_s

    @property
    def last(self) -> StepFacts:
        """The step that ended last; there must have been one."""
        return self._steps[-1]

    def has_read_a_prompt_since(self, after_s: float) -> bool:
        """Whether a step that ended after then read one."""
        return self._prompt_read_s > after_s

    def since(self, after_s: float) -> list[StepFacts]:
        """The last step, then those before it that ended after then, newest first."""
        before = islice(reversed(self._steps), 1, None)
        return [self.last, *takewhile(lambda step: step.ended_s > after_s, before)]
