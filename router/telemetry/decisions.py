"""What was decided about the sizes of the pools lately, as whoever decided told it, in words."""

from collections import deque
from dataclasses import dataclass

MAX_DECISIONS = 100
MAX_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, and when the router heard of it by its own clock."""

    sentence: str
    heard_s: float


class Decisions:
    """The last MAX_DECISIONS."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def add(self, sentence: str, now_s: float) -> None:
        """One more; what is longer than MAX_CHARACTERS is cut."""
        self._decisions.append(Decision(sentence[:MAX_CHARACTERS], now_s))

    def latest(self) -> tuple[Decision, ...]:
        """All that are kept, the last one first."""
        return tuple(reversed(self._decisions))
