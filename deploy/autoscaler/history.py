"""What the autoscaler remembers from one tick to the next: needs, changes, failed starts.

How many workers there are is not remembered: that is a fact of each tick, whoever changed it.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """Of one pool: what it needed and when, when it last changed, and until when it may not grow.

    Invariant: needs are in the order of their times.
    """

    needs: tuple[tuple[float, int | None], ...] = ()
    grown_s: float = -math.inf
    shrunk_s: float = -math.inf
    held_until_s: float = -math.inf

    def noted(self, need: int | None, now_s: float, *, keep_s: float) -> "PoolHistory":
        """With what is needed now, and without what is older than `keep_s`.

        One entry from before that stays: it shows that the whole span was looked at.
        """
        needs = (*self.needs, (now_s, need))
        num_before = sum(then_s <= now_s - keep_s for then_s, _ in needs)
        return replace(self, needs=needs[max(num_before - 1, 0) :])

    def changed(self, difference: int, now_s: float) -> "PoolHistory":
        """After a decision for `difference` more workers."""
        if difference == 0:
            return self
        return replace(self, grown_s=now_s) if difference > 0 else replace(self, shrunk_s=now_s)

    def least(self, span_s: float, now_s: float) -> int | None:
        """The least that was needed in the span up to now; None where that is not known."""
        needs = self._within(span_s, now_s)
        return min(needs) if needs else None

    def most(self, span_s: float, now_s: float) -> int | None:
        """The most that was needed in the span up to now; None where that is not known."""
        needs = self._within(span_s, now_s)
        return max(needs) if needs else None

    def _within(self, span_s: float, now_s: float) -> list[int]:
        """Needs of the span; nothing unless the whole of it was looked at and known."""
        start_s = now_s - span_s
        if not self.needs or self.needs[0][0] > start_s:
            return []
        needs = [need for then_s, need in self.needs if then_s >= start_s]
        return [] if None in needs else [need for need in needs if need is not None]


@dataclass(frozen=True, slots=True)
class State:
    """Of both pools."""

    prefill: PoolHistory = PoolHistory()
    decode: PoolHistory = PoolHistory()
