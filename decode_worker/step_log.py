"""The last steps of a decode worker: when, how long, and what was in them.

Pure: facts in; the newest are kept.
"""

from collections import deque
from itertools import islice, takewhile

from core.events.step import StepFacts

# Steps that are remembered: minutes of a large model. About 1 MiB.
MAX_STEPS = 8192


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

    def within(self, window_s: float, now_s: float) -> list[StepFacts]:
        """Those that ended in the last `window_s`, oldest first."""
        newest_first = takewhile(
            lambda step: now_s - step.ended_s <= window_s, reversed(self._steps)
        )
        return list(newest_first)[::-1]

    def since(self, after_s: float) -> list[StepFacts]:
        """The last step, then those before it that ended after then, newest first."""
        before = islice(reversed(self._steps), 1, None)
        return [self.last, *takewhile(lambda step: step.ended_s > after_s, before)]
