"""How fast workers and links were lately, from the reports of requests.

A rate is an amount per *busy* second: each report tells how long its request was at work or in the
queue behind others, and spans that overlap count once. So requests that share a step, or a link,
do not make it look slow. Nothing is known, and None, until it was measured.

Pure.
"""

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.timeline import TransferReport

# Weight of what was measured before, at each new report: about the last ten count.
KEPT = 0.9
NUM_STEADY_ANSWERS = 100

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Meter:
    """Amount per busy second of one worker or link."""

    _amount: float = 0.0
    _busy_s: float = 0.0
    _until_s: float = -math.inf

    def note(self, amount: float, span_s: float, now_s: float) -> None:
        """`amount` was done within the `span_s` seconds that end now."""
        busy_s = max(now_s - max(now_s - span_s, self._until_s), 0.0)
        self._until_s = max(now_s, self._until_s)
        self._amount = self._amount * KEPT + amount
        self._busy_s = self._busy_s * KEPT + busy_s

    @property
    def per_s(self) -> float | None:
        """The rate; None until something took time."""
        return self._amount / self._busy_s if self._busy_s > 0 and self._amount > 0 else None


@dataclass(slots=True)
class Mean:
    """Exponentially weighted mean."""

    value: float | None = None

    def note(self, value: float) -> None:
        """One more value."""
        self.value = value if self.value is None else self.value * KEPT + value * (1 - KEPT)


class Latest(Generic[Key]):
    """The latest value of each key; sum and mean cost the same for any number of them.

    Invariant: the sum is that of the values, but for rounding, which `keep` takes away.
    """

    def __init__(self) -> None:
        self._values: dict[Key, float] = {}
        self._sum = 0.0

    def note(self, key: Key, value: float | None) -> None:
        """`key` has this value now; None leaves it as it was."""
        if value is not None:
            self._sum += value - self._values.get(key, 0.0)
            self._values[key] = value

    def get(self, key: Key) -> float | None:
        """The value of `key`; None where it has none."""
        return self._values.get(key)

    @property
    def sum(self) -> float | None:
        """Of all values; None where there is none."""
        return self._sum if self._values else None

    def sum_of(self, keys: Collection[Key]) -> float | None:
        """Of these keys, those without a value taken for the mean; None where nobody has one."""
        mean = self.mean
        if mean is None:
            return None
        values = list(map(self._values.get, keys))
        return sum(filter(None, values)) + values.count(None) * mean

    @property
    def mean(self) -> float | None:
        """Of all values; None where there is none."""
        return self._sum / len(self._values) if self._values else None

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all but these."""
        self._values = {key: value for key, value in self._values.items() if key in keys}
        self._sum = math.fsum(self._values.values())


class Rates:
    """Rates of the workers that are connected, by incarnation."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._prefill: dict[str, Meter] = {}
        self._link: dict[tuple[str, str], Meter] = {}
        self._exposed: dict[tuple[str, str], Mean] = {}
        self._decode: dict[str, Mean] = {}
        self._prefill_tokens_per_s: Latest[str] = Latest()
        self._link_bytes_per_s: Latest[tuple[str, str]] = Latest()
        self._exposed_s: Latest[tuple[str, str]] = Latest()
        self._decode_s: Latest[str] = Latest()

    def note_prefill(self, worker: str, num_tokens: int, span_s: float, now_s: float) -> None:
        """`worker` read `num_tokens` prompt tokens, queue included, in `span_s` up to now."""
        meter = self._prefill.setdefault(worker, Meter())
        meter.note(num_tokens, span_s, now_s)
        self._prefill_tokens_per_s.note(worker, meter.per_s)

    def note_transfer(self, link: tuple[str, str], report: TransferReport, now_s: float) -> None:
        """A handoff over `link`, (prefill, decode), was sealed now."""
        meter = self._link.setdefault(link, Meter())
        meter.note(report.num_bytes, report.push_s, now_s)
        self._link_bytes_per_s.note(link, meter.per_s)
        exposed = self._exposed.setdefault(link, Mean())
        exposed.note(report.exposed_s)
        self._exposed_s.note(link, exposed.value)

    def note_decode(self, worker: str, decode_s: float) -> None:
        """A sequence held a decode slot of `worker` for `decode_s`."""
        self._num_answers += 1
        mean = self._decode.setdefault(worker, Mean())
        mean.note(decode_s)
        self._decode_s.note(worker, mean.value)

    @property
    def is_steady(self) -> bool:
        """Enough was measured to refuse somebody for it: the first requests are slower and smaller.

        Probes of two tokens, links that are made and caches that are cold say little of load.
        """
        return self._num_answers >= NUM_STEADY_ANSWERS

    def prefill_tokens_per_s(self, worker: str) -> float | None:
        """Of `worker`; the mean of the others while only they were measured."""
        own = self._prefill_tokens_per_s.get(worker)
        return own if own is not None else self._prefill_tokens_per_s.mean

    def all_prefill_tokens_per_s(self, workers: Collection[str]) -> float | None:
        """Of these workers together, each as `prefill_tokens_per_s` tells; None if none is."""
        return self._prefill_tokens_per_s.sum_of(workers)

    def link_bytes_per_s(self) -> float | None:
        """Of all links together that carried something."""
        return self._link_bytes_per_s.sum

    def exposed_transfer_s(self) -> float | None:
        """What a handoff takes after its last chunk was computed; the mean of the links."""
        return self._exposed_s.mean

    def decode_s(self) -> float | None:
        """How long a sequence holds a decode slot; the mean of the workers."""
        return self._decode_s.mean

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget every worker but these."""
        living = frozenset(incarnations)
        self._prefill = {name: m for name, m in self._prefill.items() if name in living}
        self._decode = {name: m for name, m in self._decode.items() if name in living}
        self._link = {pair: m for pair, m in self._link.items() if living.issuperset(pair)}
        self._exposed = {pair: m for pair, m in self._exposed.items() if pair in self._link}
        self._prefill_tokens_per_s.keep(self._prefill)
        self._decode_s.keep(self._decode)
        self._link_bytes_per_s.keep(self._link)
        self._exposed_s.keep(self._exposed)
