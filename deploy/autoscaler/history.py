"""What the autoscaler remembers from one tick to the next: needs, changes, failed starts.

How many workers there are is not remembered: that is a fact of each tick, whoever changed it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Workers that were missed would have had to stay for their whole absence; the next may be longer.
LEARNS = 2.0
# Each time that workers leave, so that bursts which do not come any more are forgotten.
FADES = 2.0


@dataclass(frozen=True, slots=True)
class Noted:
    """Workers that were needed at a moment, and that a somewhat larger load would have needed."""

    at_s: float
    num_needed: int | None
    num_ample: int | None


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """Of one pool: what it needed and when, when it last changed, and until when it may not grow.

    spared_s: when it last gave up workers that nobody needed, since when nobody did, and how many
    would have been ample; learned_s: for how long nobody may need those that leave from now on.
    Invariant: needs are in the order of their times.
    """

    needs: tuple[Noted, ...] = ()
    grown_s: float = -math.inf
    shrunk_s: float = -math.inf
    held_until_s: float = -math.inf
    spared_s: float = -math.inf
    unneeded_since_s: float = -math.inf
    num_ample: int = 0
    learned_s: float = 0.0

    def noted(self, now: Noted, *, keep_s: float) -> "PoolHistory":
        """With what is needed now, and without what is older than `keep_s`.

        One entry from before that stays: it shows that the whole span was looked at.
        """
        needs = (*self.needs, now)
        num_before = sum(noted.at_s <= now.at_s - keep_s for noted in needs)
        return replace(self, needs=needs[max(num_before - 1, 0) :])

    def changed(self, difference: int, now_s: float) -> "PoolHistory":
        """After a decision for `difference` more workers."""
        if difference == 0:
            return self
        return replace(self, grown_s=now_s) if difference > 0 else replace(self, shrunk_s=now_s)

    def spared(self, num_left: int, after_s: float, now_s: float) -> "PoolHistory":
        """All but `num_left` leave, whom nobody needed for `after_s`; what was learned halves.

        It does so once, however many times workers leave until the pool grows again. Those that
        were to spare already when others left were not needed since before that.
        """
        num_ample = self.ample(after_s, now_s)
        is_first = self.grown_s > self.spared_s
        is_known = not is_first and self.num_ample <= num_left
        return replace(
            self,
            spared_s=now_s,
            unneeded_since_s=self.unneeded_since_s if is_known else now_s - after_s,
            num_ample=num_left if num_ample is None else num_ample,
            learned_s=self.learned_s / FADES if is_first else self.learned_s,
        )

    def missed(self, now_s: float, *, most_s: float) -> "PoolHistory":
        """Requests wait for workers that left; such stay longer from now on, at most `most_s`.

        Workers that left longer ago than that teach nothing.
        """
        if now_s - self.spared_s >= most_s:
            return self
        unneeded_s = now_s - self.unneeded_since_s
        return replace(self, learned_s=min(max(self.learned_s, LEARNS * unneeded_s), most_s))

    def least(self, span_s: float, now_s: float) -> int | None:
        """The least that was needed in the span up to now; None where that is not known."""
        return min(_known(n.num_needed for n in self._within(span_s, now_s)), default=None)

    def most(self, span_s: float, now_s: float) -> int | None:
        """The most that was needed in the span up to now; None where that is not known."""
        return max(_known(n.num_needed for n in self._within(span_s, now_s)), default=None)

    def ample(self, span_s: float, now_s: float) -> int | None:
        """The most that a somewhat larger load would have needed; None where that is not known."""
        return max(_known(n.num_ample for n in self._within(span_s, now_s)), default=None)

    def _within(self, span_s: float, now_s: float) -> list[Noted]:
        """What was noted in the span; nothing unless the whole of it was looked at."""
        start_s = now_s - span_s
        if not self.needs or self.needs[0].at_s > start_s:
            return []
        return [noted for noted in self.needs if noted.at_s >= start_s]


@dataclass(frozen=True, slots=True)
class State:
    """Of both pools."""

    prefill: PoolHistory = PoolHistory()
    decode: PoolHistory = PoolHistory()


def _known(numbers: Iterable[int | None]) -> list[int]:
    """All of them; nothing if one is unknown."""
    known = list(numbers)
    return [] if None in known else [number for number in known if number is not None]
