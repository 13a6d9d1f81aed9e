"""What was delivered in the last minutes, in slots of seconds: rates, and how late tokens were.

Fed by every hand-over of tokens, so that whoever looks sees what was before he looked; read by the
live page alone. Seconds fall into bins that are 5 % wide, so a quantile is within 2.5 % of the
value. Costs less than a microsecond for each hand-over, and memory by slots, not by tokens.

Pure: what happened and when in, values out.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

SLOT_S = 2.0
NUM_SLOTS = 90
MIN_SECONDS = 1e-5
_BINS_PER_E = 1 / math.log(1.05)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of waits in seconds; None of nothing."""

    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """SLOT_S seconds; the tokens of prompts and of answers are never added."""

    num_prompt_tokens: int
    num_output_tokens: int
    ttft: Quantiles
    itl: Quantiles


@dataclass(slots=True)
class _Open:
    number: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    itl: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class Recent:
    """The last NUM_SLOTS slots; those in which nothing happened are not kept.

    Invariant: the last of `_slots` ends at `_end_s`.
    """

    def __init__(self) -> None:
        self._slots: deque[_Open] = deque(maxlen=NUM_SLOTS)
        self._end_s = -math.inf

    def first_tokens(self, ttft_s: float, num_prompt: int, num_output: int, now_s: float) -> None:
        """An answer's first tokens were handed over; its prompt has so many."""
        slot = self._slot(now_s)
        slot.num_prompt_tokens += num_prompt
        slot.num_output_tokens += num_output
        slot.ttft[_bin(ttft_s)] += 1

    def more_tokens(self, itl_s: float, num_output: int, now_s: float) -> None:
        """Further tokens of an answer were handed over, so long after those before."""
        slot = self._slot(now_s)
        slot.num_output_tokens += num_output
        slot.itl[_bin(itl_s)] += 1

    def slots(self, now_s: float) -> tuple[Slot, ...]:
        """All NUM_SLOTS that ended before `now_s`, oldest first."""
        last = _number(now_s)
        by_number = {slot.number: slot for slot in self._slots}
        empty = _Open(0)
        found = (by_number.get(number, empty) for number in range(last - NUM_SLOTS, last))
        return tuple(_closed([slot]) for slot in found)

    def lately(self, num_slots: int, now_s: float) -> Slot:
        """The last `num_slots` that ended, as one."""
        last = _number(now_s)
        return _closed([slot for slot in self._slots if last - num_slots <= slot.number < last])

    def _slot(self, now_s: float) -> _Open:
        if now_s >= self._end_s:
            number = _number(now_s)
            self._slots.append(_Open(number))
            self._end_s = (number + 1) * SLOT_S
        return self._slots[-1]


def _number(now_s: float) -> int:
    return math.floor(now_s / SLOT_S)


def _bin(seconds: float) -> int:
    return int(math.log(seconds / MIN_SECONDS) * _BINS_PER_E) if seconds > MIN_SECONDS else 0


def _closed(slots: Iterable[_Open]) -> Slot:
    slots = list(slots)
    ttft, itl = Counter[int](), Counter[int]()
    for slot in slots:
        ttft.update(slot.ttft)
        itl.update(slot.itl)
    return Slot(
        sum(slot.num_prompt_tokens for slot in slots),
        sum(slot.num_output_tokens for slot in slots),
        _quantiles(ttft),
        _quantiles(itl),
    )


def _quantiles(bins: Counter[int]) -> Quantiles:
    if not bins:
        return Quantiles()
    numbers = sorted(bins)
    ranks = list(accumulate(bins[number] for number in numbers))

    def middle(share: float) -> float:
        """Of the bin in which the value lies that this share of all do not exceed."""
        number = numbers[bisect_left(ranks, share * ranks[-1])]
        return round(MIN_SECONDS * math.exp((number + 0.5) / _BINS_PER_E), 6)

    return Quantiles(middle(0.5), middle(0.95), middle(0.99))
