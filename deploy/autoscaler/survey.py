"""The facts of one tick, put in order: who is there, the pools and links as one, the late stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.request import WorkerName
from core.settings.scaling import ScalingConfig
from core.worker import Role
from deploy.autoscaler.facts import ClusterFacts, Life, LinkView, PoolView, WorkerFacts
from deploy.autoscaler.stage import Finding, find_stage


@dataclass(frozen=True, slots=True)
class Staff:
    """Workers of one pool by what may be expected of them.

    own: those that serve, or will; turning: those that drain in the other pool to start again
    here; overdue: those that have not come up in time, and count as not there.
    """

    own: tuple[WorkerFacts, ...]
    turning: tuple[WorkerFacts, ...]
    overdue: tuple[WorkerFacts, ...]

    @classmethod
    def of(cls, workers: Sequence[WorkerFacts], role: Role, *, started_after_s: float) -> "Staff":
        """Of the pool `role`; a start from before `started_after_s` is overdue."""
        mine = [w for w in workers if w.role is role and w.life is not Life.DRAINING]
        late = [w for w in mine if w.life is Life.STARTING and w.since_s < started_after_s]
        turning = [replace(w, life=Life.STARTING) for w in workers if w.becomes is role]
        return cls(tuple(w for w in mine if w not in late), tuple(turning), tuple(late))

    @property
    def num_workers(self) -> int:
        """Those that serve, or will."""
        return len(self.own) + len(self.turning)

    def least_missed(self, num_workers: int) -> tuple[WorkerName, ...]:
        """Who leaves: first those that do not serve yet, then those with the least to finish."""

        def order(worker: WorkerFacts) -> tuple[bool, int, str]:
            num_requests = worker.load.num_running + worker.load.num_waiting
            return (worker.life is not Life.STARTING, num_requests, worker.name)

        ordered = sorted(self.own, key=order)
        return tuple(worker.name for worker in ordered[: max(num_workers, 0)])


@dataclass(frozen=True, slots=True)
class Survey:
    """What a tick knows; drained_cost is what draining workers still take of the budget."""

    staff: dict[Role, Staff]
    views: dict[Role, PoolView]
    link: LinkView
    finding: Finding
    drained_cost: float

    @classmethod
    def of(cls, scaling: ScalingConfig, facts: ClusterFacts, now_s: float) -> "Survey":
        """Of these facts."""
        heard_after_s = now_s - scaling.stale_after_s
        started_after_s = now_s - scaling.start_timeout_s
        staff = {r: Staff.of(facts.workers, r, started_after_s=started_after_s) for r in Role}
        views = {
            r: PoolView.of((*each.own, *each.turning), heard_after_s=heard_after_s)
            for r, each in staff.items()
        }
        senders = [w for w in facts.workers if w.role is Role.PREFILL]
        link = LinkView.of(senders, heard_after_s=heard_after_s)
        prefill = views[Role.PREFILL] if scaling.prefill is not None else None
        return cls(
            staff=staff,
            views=views,
            link=link,
            finding=find_stage(scaling, facts.demand, prefill, views[Role.DECODE], link),
            drained_cost=sum(
                scaling.cost(w.role is Role.PREFILL, w.role is Role.DECODE)
                for w in facts.workers
                if w.life is Life.DRAINING and w.becomes is None
            ),
        )
