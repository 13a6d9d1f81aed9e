"""The facts that /metrics looks up when it is asked: nothing to keep fresh, nothing to go stale.

What workers hold is what they said in their last heartbeat, a second ago at most; a worker that is
gone tells nothing. Pure but for reading its sources.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from core import telemetry
from core.clock import Clock
from core.config import Mode
from core.listing import WorkerState
from core.request import WorkerName
from core.telemetry import Sample
from core.worker import LinkStatus, Role, WorkerStatus
from router.dispatch import Dispatcher
from router.generation import FrontDoor
from router.members.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where the facts are; mode says which pools there should be."""

    fleet: Fleet
    dispatcher: Dispatcher
    door: FrontDoor
    clock: Clock
    mode: Mode

    def exposition(self) -> bytes:
        """What was measured and what is now, as Prometheus reads it."""
        return self.door.measured.telemetry.exposition(self.samples())

    def samples(self) -> Iterator[Sample]:
        """All of them, now."""
        num_waiting = self.dispatcher.num_waiting
        num_running = max(self.door.running.num_answers - num_waiting, 0)
        yield Sample(telemetry.REQUESTS_RUNNING, num_running)
        yield Sample(telemetry.REQUESTS_WAITING, num_waiting)
        yield Sample(telemetry.OLDEST_IN_LINE, self.dispatcher.demand.oldest_in_line_s)
        yield Sample(telemetry.READY, self.door.readiness.is_ready)
        yield Sample(telemetry.STUCK_WORKERS, len(self.fleet.stuck))
        yield from self._totals()
        for outcome, count in self.door.traces.counts.items():
            yield Sample(telemetry.TRACE_SPANS, count, (outcome,))
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
        for labels, count in self.door.counters.failures.items():
            yield Sample(telemetry.ATTEMPT_FAILURES, count, labels)

    def _pool(self, role: Role) -> Iterator[Sample]:
        members, now_s = self.fleet.members(role), self.clock.now_s()
        states = Counter(member.state(now_s) for member in members)
        is_needed = role is Role.DECODE or self.mode is Mode.DISAGGREGATED
        # None is a number, too, where there should be some: a pool that is gone is told as such.
        for state in WorkerState if is_needed or members else ():
            yield Sample(telemetry.WORKERS, states[state], (role, state))
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
    yield Sample(telemetry.WORKER_OLDEST_WAIT, status.signals.oldest_wait_s, (name,))
    yield Sample(telemetry.QUARANTINE_AGE, status.quarantine_age_s, (name,))
    yield from status.samples
    if status.role is Role.PREFILL:  # both ends tell of a link
        yield Sample(telemetry.KV_IN_FLIGHT, status.signals.num_in_flight_bytes, (name,))
        # Of links to several incarnations of a name the last is the one that is used.
        for link in {link.peer: link for link in status.links}.values():
            yield from _link(name, link)


def _link(prefill: WorkerName, link: LinkStatus) -> Iterator[Sample]:
    labels = (prefill, link.peer, link.backend)
    if link.bytes_per_s is not None and link.latency_s is not None:
        yield Sample(telemetry.LINK_BANDWIDTH, link.bytes_per_s, labels)
        yield Sample(telemetry.LINK_ROUND_TRIP, link.latency_s, labels)
