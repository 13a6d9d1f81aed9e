"""One tick: facts in, a decision and its record out.

1 the workers become one view per pool and one of the links, and the stage that holds requests back
  is found, from the end (`survey`, `facts`, `stage`)
2 what each pool needs is worked out from measured rates (`need`) and remembered (`history`)
3 each pool makes a wish, by windows, cool-downs and the stage (`wish`)
4 bounds, ratio and budget make one pair of the wishes (`share`, `fit`)
5 the difference to what is there becomes actions

Pure. Dead workers are not in the facts, so their replacement is an ordinary growth.
"""

from collections.abc import Callable
from dataclasses import replace

from core.settings.scaling import ScalingConfig
from core.signals import Demand
from core.worker import Role
from deploy.autoscaler.facts import ClusterFacts, PoolView
from deploy.autoscaler.fit import Pair
from deploy.autoscaler.history import Noted, PoolHistory, State
from deploy.autoscaler.need import Need, decode_need, prefill_need
from deploy.autoscaler.record import Action, ChangeRole, Drain, GiveUp, PoolRecord, Record, Start
from deploy.autoscaler.share import Shared, patience_s, share
from deploy.autoscaler.survey import Staff, Survey
from deploy.autoscaler.wish import Pool, Rule, Wish, is_late, shrink_after_s, wish_of


def tick(
    scaling: ScalingConfig, facts: ClusterFacts, now_s: float, state: State
) -> tuple[Record, State]:
    """What to do now, told as a record, and what to remember for the next tick.

    Contract: side-effect free; called every `interval_s`. The actions of the record are to be
    carried out unless it is of a dry run.
    """
    survey = Survey.of(scaling, facts, now_s)
    pools = _pools(scaling, facts.demand, survey, state, now_s)
    wishes = {
        role: wish_of(scaling, pool, survey.finding, facts.demand, now_s)
        for role, pool in pools.items()
    }
    shared = share(scaling, pools, wishes, survey.drained_cost, now_s)
    after = {Role.PREFILL: shared.target.prefill, Role.DECODE: shared.target.decode}
    record = Record(
        now_s=now_s,
        finding=survey.finding,
        pools=tuple(_told(scaling, pools[r], wishes[r], after[r], shared) for r in pools),
        link=survey.link,
        demand=facts.demand,
        actions=steps_to(shared.target, survey.staff, may_change=scaling.role_change),
        is_dry_run=scaling.dry_run,
    )
    histories = {
        role.value: _after(scaling, pool, wishes[role], after[role], now_s)
        for role, pool in pools.items()
    }
    return record, State(**histories)


def _pools(
    scaling: ScalingConfig, demand: Demand, survey: Survey, state: State, now_s: float
) -> dict[Role, Pool]:
    """Each pool with what it needs now, noted in its history."""
    pools = {}
    if scaling.prefill is not None:
        need = _need(prefill_need, scaling, demand, survey.views[Role.PREFILL])
        pools[Role.PREFILL] = _pool(scaling, Role.PREFILL, survey, need, state.prefill, now_s)
    need = _need(decode_need, scaling, demand, survey.views[Role.DECODE])
    pools[Role.DECODE] = _pool(scaling, Role.DECODE, survey, need, state.decode, now_s)
    return pools


def _need(
    need_of: Callable[[ScalingConfig, Demand, PoolView], Need],
    scaling: ScalingConfig,
    demand: Demand,
    view: PoolView,
) -> Need:
    more = replace(demand, requests_per_s=demand.requests_per_s * (1 + scaling.hysteresis))
    num_ample = need_of(scaling, more, view).num_workers
    return replace(need_of(scaling, demand, view), num_ample=num_ample)


def _pool(
    scaling: ScalingConfig,
    role: Role,
    survey: Survey,
    need: Need,
    history: PoolHistory,
    now_s: float,
) -> Pool:
    bounds = scaling.prefill if role is Role.PREFILL else scaling.decode
    assert bounds is not None
    view, finding = survey.views[role], survey.finding
    if is_late(role, finding) and finding.is_wait and view.is_known and not view.num_starting:
        # Whatever the rates say, requests do wait: one more than there are.
        least = max(need.num_workers or 0, view.num_workers + 1)
        need = replace(need, num_workers=least, num_ample=max(need.num_ample or 0, least))
    keep_s = max(shrink_after_s(scaling, history), patience_s(scaling))
    noted = Noted(now_s, need.num_workers, need.num_ample)
    history = history.noted(noted, keep_s=keep_s)
    if survey.staff[role].overdue:
        history = replace(history, held_until_s=now_s + scaling.start_timeout_s)
    return Pool(role, bounds, view, need, history)


def _after(scaling: ScalingConfig, pool: Pool, wish: Wish, after: int, now_s: float) -> PoolHistory:
    difference = after - pool.view.num_workers
    history = pool.history.changed(difference, now_s)
    if difference < 0 and wish.rule is Rule.SPARE:
        return history.spared(after, shrink_after_s(scaling, history), now_s)
    if difference > 0 and wish.rule is Rule.LATE:
        return history.missed(now_s, most_s=scaling.max_shrink_after_s)
    return history


def _told(scaling: ScalingConfig, pool: Pool, wish: Wish, after: int, shared: Shared) -> PoolRecord:
    before, needed = pool.view.num_workers, pool.need.num_workers
    if shared.rule is None or after == wish.num_workers:
        return PoolRecord(pool.role, pool.view, before, needed, after, wish.rule, wish.why)
    held = f", and an exchange back has to help for {patience_s(scaling):g} s"
    reasons = {
        Rule.BUDGET: f"the budget of {scaling.budget or 0:g} is spent{held * shared.is_held}",
        Rule.DRAINING: "workers that drain still take their part of the budget",
        Rule.BOUNDS: (
            f"bounds of {pool.bounds.min_replicas} to {pool.bounds.max_replicas} and the ratio of "
            f"{scaling.min_ratio:g} to {scaling.max_ratio:g} prefill per decode"
        ),
    }
    why = f"{reasons[shared.rule]}; by itself {wish.num_workers} ({wish.rule.value}): {wish.why}"
    return PoolRecord(pool.role, pool.view, before, needed, after, shared.rule, why)


def steps_to(target: Pair, staff: dict[Role, Staff], *, may_change: bool) -> tuple[Action, ...]:
    """What turns the workers that are there into `target`."""
    given_up = tuple(w.name for role in Role for w in staff[role].overdue)
    actions: list[Action] = [GiveUp(given_up)] if given_up else []
    missing = {
        Role.PREFILL: target.prefill - staff[Role.PREFILL].num_workers,
        Role.DECODE: target.decode - staff[Role.DECODE].num_workers,
    }
    leaving = {role: staff[role].least_missed(-missing[role]) for role in Role}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        num_changing = min(len(leaving[other]), max(missing[role], 0)) if may_change else 0
        if num_changing:
            actions.append(ChangeRole(leaving[other][:num_changing], role))
            leaving[other] = leaving[other][num_changing:]
        if missing[role] > num_changing:
            actions.append(Start(role, missing[role] - num_changing))
    names = (*leaving[Role.PREFILL], *leaving[Role.DECODE])
    return (*actions, Drain(names)) if names else tuple(actions)
