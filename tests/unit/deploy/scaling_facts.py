"""Facts for tests of the autoscaler, and a small plant that its decisions act on."""

import math
from dataclasses import dataclass, field, replace

from core.clock import ManualClock
from core.request import WorkerName
from core.settings.scaling import DecodeScaling, PoolScaling, ScalingConfig
from core.signals import Demand, Moments, Signals
from core.worker import Role
from deploy.autoscaler.autoscaler import tick
from deploy.autoscaler.facts import ClusterFacts, Life, Load, WorkerFacts
from deploy.autoscaler.history import State
from deploy.autoscaler.record import ChangeRole, Drain, GiveUp, Start

NOW_S = 1000.0


def scaling_of(**changes):
    """Quick to decide, 1 to 8 workers in each pool."""
    given = {
        "prefill": PoolScaling(max_replicas=8),
        "decode": DecodeScaling(max_replicas=8),
        "interval_s": 5.0,
        "grow_after_s": 10.0,
        "shrink_after_s": 60.0,
        "cooldown_s": 30.0,
    } | changes
    return ScalingConfig(**given)


def worker(name, role=None, *, life=Life.SERVING, heard_s=NOW_S, since_s=0.0, **load):
    """A worker; its role is the first letter of its name unless given."""
    role = role or (Role.PREFILL if name.startswith("p") else Role.DECODE)
    becomes = load.pop("becomes", None)
    return WorkerFacts(WorkerName(name), role, life, since_s, heard_s, Load(**load), becomes)


def prefill(name, **signals):
    """A prefill worker that reads 1,000 tokens/s."""
    load = {
        key: signals.pop(key)
        for key in ("life", "heard_s", "since_s", "num_waiting", "num_queued_tokens", "becomes")
        if key in signals
    }
    return worker(name, signals=Signals(**{"tokens_per_s": 1000.0} | signals), **load)


def decode(name, *, num_running=0, num_slots=16, kv_use=0.0, num_waiting=0, **signals):
    """A decode worker of 16 slots."""
    load = {
        key: signals.pop(key)
        for key in ("life", "heard_s", "since_s", "becomes", "num_reservations")
        if key in signals
    }
    return worker(
        name,
        num_running=num_running,
        num_slots=num_slots,
        kv_use=kv_use,
        num_waiting=num_waiting,
        signals=Signals(**{"step_s": 0.03} | signals),
        **load,
    )


def demand_of(requests_per_s=1.0, *, prompt=500.0, decode_s=4.0, **changes):
    """Random arrivals of like requests."""
    return Demand(
        requests_per_s=requests_per_s,
        num_prompt_tokens=Moments(prompt, 1.0),
        decode_s=Moments(decode_s, 1.0),
        **changes,
    )


@dataclass
class Run:
    """The autoscaler on a manual clock, with facts that stay or that a function gives."""

    scaling: ScalingConfig
    state: State = State()
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_S))
    records: list = field(default_factory=list)

    def tick(self, workers, demand):
        """One tick; what was said is said again, now."""
        now_s = self.clock.now_s()
        told = tuple(replace(w, heard_s=None if w.heard_s is None else now_s) for w in workers)
        record, self.state = tick(self.scaling, ClusterFacts(told, demand), now_s, self.state)
        self.records.append(record)
        self.clock.advance(self.scaling.interval_s)
        return record

    def ticks(self, seconds, workers, demand):
        """The same facts again and again; the last record."""
        for _ in range(max(round(seconds / self.scaling.interval_s), 1)):
            record = self.tick(workers, demand)
        return record


def after(record, role):
    """What a record decided for one pool."""
    return next(pool for pool in record.pools if pool.role is role)


@dataclass
class Plant:
    """Workers that start, drain and serve a load in which every queue is in equilibrium."""

    run: Run
    start_s: float = 20.0
    drain_s: float = 10.0
    workers: dict = field(default_factory=dict)
    num_made: int = 0
    fails_to_start: frozenset = frozenset()

    def add(self, role, life=Life.STARTING):
        self.num_made += 1
        name = f"{role.value}-{self.num_made}"
        self.workers[name] = worker(
            name, role, life=life, heard_s=None, since_s=self.run.clock.now_s()
        )

    def count(self, role):
        return sum(w.role is role and w.life is Life.SERVING for w in self.workers.values())

    def step(self, demand, noise=1.0):
        """Let an interval pass, then decide on what is measured, and carry it out."""
        now_s = self.run.clock.now_s()
        self._pass(now_s)
        record = self.run.tick(self._measured(demand, noise), demand)
        for action in record.actions:
            self._do(action, now_s)
        return record

    def _pass(self, now_s):
        for name, w in list(self.workers.items()):
            age_s = now_s - w.since_s
            if w.life is Life.STARTING and age_s >= self.start_s:
                if w.role not in self.fails_to_start:
                    self.workers[name] = replace(w, life=Life.SERVING, since_s=now_s)
            elif w.life is Life.DRAINING and age_s >= self.drain_s:
                del self.workers[name]
                if w.becomes is not None:
                    self.add(w.becomes)

    def _measured(self, demand, noise):
        told = []
        for name, w in self.workers.items():
            num_peers = max(self.count(w.role), 1)
            if w.life is Life.STARTING:
                told.append(w)
            elif w.role is Role.PREFILL:
                told.append(prefill(name, life=w.life, since_s=w.since_s, becomes=w.becomes))
            else:
                busy = demand.requests_per_s * demand.decode_s.mean * noise / num_peers
                num_running = min(math.ceil(busy), 16)
                step_s = 0.02 + 0.001 * num_running
                told.append(
                    decode(
                        name,
                        life=w.life,
                        since_s=w.since_s,
                        becomes=w.becomes,
                        num_running=num_running,
                        step_s=step_s,
                    )
                )
        return told

    def _do(self, action, now_s):
        match action:
            case Start(role, num_workers):
                for _ in range(num_workers):
                    self.add(role)
            case Drain(names):
                self._drain(names, now_s)
            case ChangeRole(names, to):
                self._drain(names, now_s, to)
            case GiveUp(names):
                for name in names:
                    del self.workers[name]

    def _drain(self, names, now_s, becomes=None):
        for name in names:
            w = self.workers[name]
            if w.life is Life.STARTING:
                del self.workers[name]
                if becomes is not None:
                    self.add(becomes)
            else:
                self.workers[name] = replace(w, life=Life.DRAINING, since_s=now_s, becomes=becomes)
