"""What one pool should do by itself, before both share bounds, ratio and budget.

A pool grows to the least that it needed at any moment of `grow_after_s`, and shrinks to the most
that a somewhat larger load would have needed at any moment of `shrink_after_s`: one value high or
low decides nothing, and under a constant load the two cannot chase each other (the stabilisation
windows of Kubernetes' autoscaler). Where bursts come again soon after their workers have left, the
latter span becomes longer (`history`), as keep-alive times that learn from idle times do (Shahrad
et al., "Serverless in the Wild", USENIX ATC 2020).
"""

from dataclasses import dataclass
from enum import StrEnum

from core.settings.scaling import PoolScaling, ScalingConfig
from core.signals import Demand
from core.worker import Role
from deploy.autoscaler.facts import PoolView
from deploy.autoscaler.history import PoolHistory
from deploy.autoscaler.need import Need
from deploy.autoscaler.stage import Finding, Stage

# Of a pool in use one worker in so many leaves at once, but one at least, and others when it
# can be seen what those that stay do: with fewer workers batches grow, steps take longer, and so do
# answers, which the rates of now do not tell. That takes some answers that they began.
ONE_IN = 10
NUM_ANSWERS_SEEN = 2


class Rule(StrEnum):
    """Which rule decided for a pool; docs/scaling.md explains each."""

    STEADY = "steady"
    LATE = "late"
    AHEAD = "ahead"
    SPARE = "spare"
    OTHER_STAGE = "other_stage"
    UNKNOWN = "unknown"
    COOLING = "cooling"
    START_FAILED = "start_failed"
    IDLE = "idle"
    WAKE = "wake"
    BOUNDS = "bounds"
    BUDGET = "budget"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Wish:
    """So many workers, by which rule, and why as the rest of a sentence."""

    num_workers: int
    rule: Rule
    why: str


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool as it is looked at in one tick; `history` holds what it needs now."""

    role: Role
    bounds: PoolScaling
    view: PoolView
    need: Need
    history: PoolHistory


# A stage that is late while an earlier pool would grow: the new workers would only wait for it.
_HOLDING = {Role.PREFILL: {Stage.LINK, Stage.DECODE}, Role.DECODE: {Stage.LINK}}


def wish_of(
    scaling: ScalingConfig, pool: Pool, finding: Finding, demand: Demand, now_s: float
) -> Wish:
    """What `pool` should do."""
    num_workers = pool.view.num_workers
    if scaling.decode.min_replicas == 0 and demand.idle_s >= scaling.idle_s:
        return Wish(0, Rule.IDLE, f"nobody has asked for {demand.idle_s:.0f} s")
    if num_workers == 0 and (demand.num_in_line or demand.requests_per_s):
        why = f"{demand.num_in_line} requests wait for a worker"
        return Wish(max(pool.need.num_workers or 0, 1), Rule.WAKE, why)
    if pool.need.num_workers is None:
        return Wish(num_workers, Rule.UNKNOWN, pool.need.why)
    least = pool.history.least(scaling.grow_after_s, now_s)
    if least is not None and least > num_workers:
        return _grow(scaling, pool, finding, least, now_s)
    most = pool.history.ample(shrink_after_s(scaling, pool.history), now_s)
    if num_workers and most is not None and max(most, 1) < num_workers:
        return _shrink(scaling, pool, finding, most, demand, now_s)
    return Wish(num_workers, Rule.STEADY, pool.need.why)


def shrink_after_s(scaling: ScalingConfig, history: PoolHistory) -> float:
    """For how long workers must not have been needed before they leave."""
    return max(scaling.shrink_after_s, history.learned_s)


def is_late(role: Role, finding: Finding) -> bool:
    """Whether the pool `role` is the stage that holds requests back."""
    return finding.stage.value == role.value


def _grow(scaling: ScalingConfig, pool: Pool, finding: Finding, least: int, now_s: float) -> Wish:
    num_workers = pool.view.num_workers
    if finding.stage in _HOLDING[pool.role]:
        return Wish(num_workers, Rule.OTHER_STAGE, finding.why)
    if now_s < pool.history.held_until_s:
        left_s = pool.history.held_until_s - now_s
        why = f"workers did not start in time; tried again in {left_s:.0f} s"
        return Wish(num_workers, Rule.START_FAILED, why)
    if now_s - pool.history.shrunk_s < scaling.cooldown_s:
        return Wish(num_workers, Rule.COOLING, f"it shrank less than {scaling.cooldown_s:g} s ago")
    if is_late(pool.role, finding):
        return Wish(least, Rule.LATE, f"{finding.why}; {pool.need.why}")
    return Wish(least, Rule.AHEAD, pool.need.why)


def _shrink(
    scaling: ScalingConfig, pool: Pool, finding: Finding, most: int, demand: Demand, now_s: float
) -> Wish:
    num_workers = pool.view.num_workers
    if is_late(pool.role, finding):
        return Wish(num_workers, Rule.STEADY, finding.why)
    if pool.view.has_stale:
        num_silent = pool.view.num_serving - pool.view.num_known
        why = f"{num_silent} of its workers have not told what they hold"
        return Wish(num_workers, Rule.UNKNOWN, why)
    if now_s - pool.history.grown_s < scaling.cooldown_s:
        return Wish(num_workers, Rule.COOLING, f"it grew less than {scaling.cooldown_s:g} s ago")
    if most > 0:
        settled_s = scaling.cooldown_s
        if pool.role is Role.DECODE and demand.decode_s is not None:
            settled_s += NUM_ANSWERS_SEEN * demand.decode_s.mean
        if now_s - pool.history.shrunk_s < settled_s:
            why = f"it shrank less than {settled_s:.0f} s ago"
            return Wish(num_workers, Rule.COOLING, why)
        most = max(most, num_workers - max(num_workers // ONE_IN, 1))
    return Wish(
        max(most, 1),
        Rule.SPARE,
        f"no more were needed for {shrink_after_s(scaling, pool.history):.0f} s",
    )
