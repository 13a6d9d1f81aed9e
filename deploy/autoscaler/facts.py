"""What the autoscaler is told: the workers as they are now, and what the router is asked for.

A worker that died is not in the facts, and so nothing that it said is. What was said longer ago
than `stale_after_s` counts as unknown, never as zero. How the workers of a pool become one view:

- counts (waiting, queued tokens, parked, bytes, slots) are sums over those that are known
- waits are those of the worst; rates, step time and KV use are means over those that measured them
- a worker that drains is no part of its pool's view: it takes nothing new
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.request import WorkerName
from core.signals import Demand, Signals
from core.worker import Role


class Life(StrEnum):
    """How far a worker is."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker holds, and what it measured.

    num_running of num_slots sequences decode; num_reservations hold KV blocks, those whose prompt
    is still read or moved included.
    """

    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_running: int = 0
    num_slots: int = 0
    num_reservations: int = 0
    kv_use: float = 0.0
    signals: Signals = Signals()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker that is there; heard_s is when it told its load, None before it ever did.

    becomes: the pool in which it starts again once it is drained.
    """

    name: WorkerName
    role: Role
    life: Life
    since_s: float
    heard_s: float | None = None
    load: Load = Load()
    becomes: Role | None = None


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Everything that one decision is made from."""

    workers: tuple[WorkerFacts, ...]
    demand: Demand


@dataclass(frozen=True, slots=True)
class PoolView:
    """The workers of one pool as one; num_known of num_serving have told their load lately."""

    num_serving: int
    num_starting: int
    num_known: int
    num_waiting: int
    num_queued_tokens: int
    num_parked: int
    num_running: int
    num_slots: int
    num_reservations: int
    kv_use: float
    oldest_wait_s: float
    wait_p95_s: float
    tokens_per_s: float | None
    step_s: float | None

    @property
    def num_workers(self) -> int:
        """Those that serve, and those that will."""
        return self.num_serving + self.num_starting

    @property
    def is_known(self) -> bool:
        """Whether at least half of the workers that serve have told their load lately."""
        return self.num_known > 0 and 2 * self.num_known >= self.num_serving

    @property
    def has_stale(self) -> bool:
        """Whether something is not known of a worker that serves."""
        return self.num_known < self.num_serving

    @property
    def num_slots_each(self) -> float:
        """Decode slots of one worker."""
        return self.num_slots / self.num_known if self.num_known else 0.0

    @classmethod
    def of(cls, workers: Sequence[WorkerFacts], *, heard_after_s: float) -> "PoolView":
        """Of the workers of one pool that neither drain nor are overdue."""
        known = [
            w.load
            for w in workers
            if w.life is Life.SERVING and w.heard_s is not None and w.heard_s >= heard_after_s
        ]
        return cls(
            num_serving=sum(w.life is Life.SERVING for w in workers),
            num_starting=sum(w.life is Life.STARTING for w in workers),
            num_known=len(known),
            num_waiting=sum(load.num_waiting for load in known),
            num_queued_tokens=sum(load.num_queued_tokens for load in known),
            num_parked=sum(load.signals.num_parked for load in known),
            num_running=sum(load.num_running for load in known),
            num_slots=sum(load.num_slots for load in known),
            num_reservations=sum(load.num_reservations for load in known),
            kv_use=mean([load.kv_use for load in known]) or 0.0,
            oldest_wait_s=max((load.signals.oldest_wait_s for load in known), default=0.0),
            wait_p95_s=max((load.signals.queue_wait_p95_s or 0.0 for load in known), default=0.0),
            tokens_per_s=mean([load.signals.tokens_per_s for load in known]),
            step_s=mean([load.signals.step_s for load in known]),
        )


@dataclass(frozen=True, slots=True)
class LinkView:
    """All links as one, from the prefill workers that are known; None where nothing moved."""

    num_in_flight_bytes: int
    bytes_per_s: float | None
    max_bytes_per_s: float | None

    @property
    def wait_s(self) -> float:
        """How long the bytes in flight take at what the links carry while they are busy."""
        return self.num_in_flight_bytes / self.max_bytes_per_s if self.max_bytes_per_s else 0.0

    @property
    def use(self) -> float:
        """Share of what the links could carry that they do carry."""
        if self.bytes_per_s is None or not self.max_bytes_per_s:
            return 0.0
        return self.bytes_per_s / self.max_bytes_per_s

    @classmethod
    def of(cls, workers: Sequence[WorkerFacts], *, heard_after_s: float) -> "LinkView":
        """Of the links of these workers, draining ones included: their bytes are on the way."""
        signals = [
            w.load.signals for w in workers if w.heard_s is not None and w.heard_s >= heard_after_s
        ]
        moved = [s for s in signals if s.bytes_per_s is not None and s.max_bytes_per_s is not None]
        return cls(
            num_in_flight_bytes=sum(s.num_in_flight_bytes for s in signals),
            bytes_per_s=sum(s.bytes_per_s or 0.0 for s in moved) if moved else None,
            max_bytes_per_s=sum(s.max_bytes_per_s or 0.0 for s in moved) if moved else None,
        )


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
