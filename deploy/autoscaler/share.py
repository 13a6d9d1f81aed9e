"""What becomes of both pools' wishes under bounds, ratio and one budget."""

from dataclasses import dataclass

from core.settings.scaling import ScalingConfig
from core.worker import Role
from deploy.autoscaler.fit import ROUNDING, Pair, fit, is_allowed, shortage
from deploy.autoscaler.wish import Pool, Rule, Wish


@dataclass(frozen=True, slots=True)
class Shared:
    """The pair, and the rule where it is another than was wished."""

    target: Pair
    rule: Rule | None = None


def share(
    scaling: ScalingConfig,
    pools: dict[Role, Pool],
    wishes: dict[Role, Wish],
    drained_cost: float,
    now_s: float,
) -> Shared:
    """The pair that serves the wishes best.

    Where the budget, or the ratio, lets one pool grow only if the other gives, it gives by what it
    needs now, and only if that helps by `hysteresis`; one whose need is not known gives nobody.
    """
    current = _pair({role: pool.view.num_workers for role, pool in pools.items()})
    wanted = _pair({role: wish.num_workers for role, wish in wishes.items()})
    target = fit(scaling, wanted, drained_cost=drained_cost)
    if target is None:
        return Shared(current, Rule.DRAINING)
    if target == wanted:
        return Shared(target)
    gives = target.prefill < min(current.prefill, wanted.prefill) or (
        target.decode < min(current.decode, wanted.decode)
    )
    if not gives or not is_allowed(scaling, current, drained_cost=drained_cost):
        cost = scaling.cost(wanted.prefill, wanted.decode) + drained_cost
        is_paid = scaling.budget is None or cost <= scaling.budget + ROUNDING
        return Shared(target, Rule.BOUNDS if is_paid else Rule.BUDGET)
    recent = _pair({r: _recent(scaling, pools[r], wish, now_s) for r, wish in wishes.items()})
    exchanged = fit(scaling, recent, drained_cost=drained_cost) or current
    gain = shortage(recent, current) / shortage(recent, exchanged)
    is_known = all(pool.need.num_workers is not None for pool in pools.values())
    if is_known and gain >= 1 + scaling.hysteresis and not _is_cooling(scaling, pools, now_s):
        return Shared(exchanged, Rule.BUDGET)
    kept = fit(scaling, recent, drained_cost=drained_cost, least=current)
    return Shared(kept or current, Rule.BUDGET)


def _recent(scaling: ScalingConfig, pool: Pool, wish: Wish, now_s: float) -> int:
    """The most that a pool needed lately; its wish where it grows, or that is not known."""
    most = pool.history.most(scaling.grow_after_s, now_s)
    if most is None or pool.view.has_stale or wish.num_workers > pool.view.num_workers:
        return wish.num_workers
    return max(min(wish.num_workers, most), 1)


def _is_cooling(scaling: ScalingConfig, pools: dict[Role, Pool], now_s: float) -> bool:
    changes_s = [max(pool.history.grown_s, pool.history.shrunk_s) for pool in pools.values()]
    return now_s - max(changes_s) < scaling.cooldown_s


def _pair(numbers: dict[Role, int]) -> Pair:
    return Pair(numbers.get(Role.PREFILL, 0), numbers[Role.DECODE])
