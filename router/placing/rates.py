"""How fast workers and links were lately, from the reports of requests.

A rate is an amount per *busy* second: each report tells how long its request was at work or in the
queue behind others, and spans that overlap count once. So requests that share a step, or a link,
do not make it look slow. Nothing is known, and None, until it was measured.

Pure.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from core.timeline import TransferReport

# Weight of what was measured before, at each new report: about the last ten count.
KEPT = 0.9
NUM_STEADY_ANSWERS = 100


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


class Rates:
    """Rates of the workers that are connected, by incarnation."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._prefill: dict[str, Meter] = {}
        self._link: dict[tuple[str, str], Meter] = {}
        self._exposed: dict[tuple[str, str], Mean] = {}
        self._decode: dict[str, Mean] = {}

    def note_prefill(self, worker: str, num_tokens: int, span_s: float, now_s: float) -> None:
        """`worker` read `num_tokens` prompt tokens, queue included, in `span_s` up to now."""
        self._prefill.setdefault(worker, Meter()).note(num_tokens, span_s, now_s)

    def note_transfer(self, link: tuple[str, str], report: TransferReport, now_s: float) -> None:
        """A handoff over `link`, (prefill, decode), was sealed now."""
        self._link.setdefault(link, Meter()).note(report.num_bytes, report.push_s, now_s)
        self._exposed.setdefault(link, Mean()).note(report.exposed_s)

    def note_decode(self, worker: str, decode_s: float) -> None:
        """A sequence held a decode slot of `worker` for `decode_s`."""
        self._num_answers += 1
        self._decode.setdefault(worker, Mean()).note(decode_s)

    @property
    def is_steady(self) -> bool:
        """Enough was measured to refuse somebody for it: the first requests are slower and smaller.

        Probes of two tokens, links that are made and caches that are cold say little of load.
        """
        return self._num_answers >= NUM_STEADY_ANSWERS

    def prefill_tokens_per_s(self, worker: str) -> float | None:
        """Of `worker`; the mean of the others while only they were measured."""
        own = self._prefill.get(worker)
        if own is not None and own.per_s is not None:
            return own.per_s
        return _mean([meter.per_s for meter in self._prefill.values()])

    def link_bytes_per_s(self) -> float | None:
        """Of all links together that carried something."""
        known = [rate for meter in self._link.values() if (rate := meter.per_s) is not None]
        return sum(known) if known else None

    def exposed_transfer_s(self) -> float | None:
        """What a handoff takes after its last chunk was computed; the mean of the links."""
        return _mean([mean.value for mean in self._exposed.values()])

    def decode_s(self) -> float | None:
        """How long a sequence holds a decode slot; the mean of the workers."""
        return _mean([mean.value for mean in self._decode.values()])

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget every worker but these."""
        self._prefill = {name: m for name, m in self._prefill.items() if name in incarnations}
        self._decode = {name: m for name, m in self._decode.items() if name in incarnations}
        self._link = {pair: m for pair, m in self._link.items() if {*pair} <= {*incarnations}}
        self._exposed = {pair: m for pair, m in self._exposed.items() if pair in self._link}


def _mean(values: Collection[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
