"""The facts that /metrics looks up when it is asked: nothing to keep fresh, nothing to go stale.

What workers hold is what they said in their last heartbeat, a second ago at most; a worker that is
gone tells nothing. Pure but for reading its sources.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from core import telemetry
from core.clock import Clock
from core.telemetry import Sample
from core.worker import Role, WorkerStatus
from router.dispatch import Dispatcher
from router.generation import FrontDoor
from router.members.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where the facts are."""

    fleet: Fleet
    dispatcher: Dispatcher
    door: FrontDoor
    clock: Clock

    def exposition(self) -> bytes:
        """What was measured and what is now, as Prometheus reads it."""
        return self.door.measured.telemetry.exposition(self.samples())

    def samples(self) -> Iterator[Sample]:
        """All of them, now."""
        num_waiting = self.dispatcher.num_waiting
        num_running = max(self.door.running.num_answers - num_waiting, 0)
        yield Sample(telemetry.REQUESTS_RUNNING, num_running)
        yield Sample(telemetry.REQUESTS_WAITING, num_waiting)
        yield Sample(telemetry.READY, self.door.readiness.is_ready)
        yield from self._totals()
        for role in Role:
            yield from self._pool(role)

    def _totals(self) -> Iterator[Sample]:
        totals = self.door.counters.totals
        yield Sample(telemetry.KV_SOURCE, totals.num_transferred_tokens, ("transferred",))
        yield Sample(telemetry.KV_SOURCE, totals.num_decode_cached_tokens, ("cached",))
        yield Sample(telemetry.KV_SOURCE, totals.num_local_prefill_tokens, ("local",))
        yield Sample(telemetry.HANDOFFS, totals.num_sealed_handoffs, ("sealed",))
        yield Sample(telemetry.HANDOFFS, totals.num_failed_handoffs, ("failed",))
        yield Sample(telemetry.MIGRATIONS, totals.num_migrations, ("sealed",))
        for reason, count in totals.failed_migrations:
            yield Sample(telemetry.MIGRATIONS, count, (reason,))
        yield Sample(telemetry.MIGRATED_BYTES, totals.num_migrated_bytes)

    def _pool(self, role: Role) -> Iterator[Sample]:
        members, now_s = self.fleet.members(role), self.clock.now_s()
        states = Counter(member.state(now_s) for member in members)
        for state, count in sorted(states.items()):
            yield Sample(telemetry.WORKERS, count, (role, state))
        for member in members:
            if member.status is not None:
                yield from _worker(member.status)


def _worker(status: WorkerStatus) -> Iterator[Sample]:
    name, cached = status.name, status.num_cached_blocks
    blocks = {
        "free": status.num_free_blocks - cached,
        "cached": cached,
        "used": status.num_used_blocks,
        "quarantined": status.num_quarantined_blocks,
    }
    for state, count in blocks.items():
        yield Sample(telemetry.KV_BLOCKS, count, (name, state))
    yield Sample(telemetry.WORKER_REQUESTS, status.num_waiting_requests, (name, "waiting"))
    yield Sample(telemetry.WORKER_REQUESTS, status.num_running_requests, (name, "running"))
    yield Sample(telemetry.WORKER_STEPS, status.num_steps, (name, status.role))
    if status.role is Role.PREFILL:  # both ends tell of a link
        num_bytes: Counter[tuple[str, str, str]] = Counter()
        for link in status.links:
            num_bytes[name, link.peer, link.backend] += link.num_bytes
        for labels, count in num_bytes.items():
            yield Sample(telemetry.LINK_BYTES, count, labels)
