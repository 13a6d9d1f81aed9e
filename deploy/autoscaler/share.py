"""What becomes of both pools' wishes under bounds, ratio and one budget.

Where the budget is spent, or the ratio forbids, one pool can only grow if the other gives: an
exchange. Where both are too small for the load, no split is right, and noise makes now one and now
the other look better. Two rules keep them from passing a worker to and fro:

- The one that gives is judged by the most that it needed lately, which may be more than it has:
  by what it has it would seem content with two workers while it has two, and with one once it has
  one.
- An exchange that turns both pools back has to help for as long as `patience_s` says, unless it
  halves the shortage: then the load itself has turned.
"""

from dataclasses import dataclass

from core.settings.scaling import ScalingConfig
from core.worker import Role
from deploy.autoscaler.fit import ROUNDING, Pair, fit, is_allowed, shortage
from deploy.autoscaler.wish import Pool, Rule, Wish

# So many times smaller a shortage is explained by a load that turned, not by noise.
TURNED = 2.0


@dataclass(frozen=True, slots=True)
class Shared:
    """The pair, and the rule where it is another than was wished.

    `is_held`: an exchange would help by what was needed lately, but would turn both pools back.
    """

    target: Pair
    rule: Rule | None = None
    is_held: bool = False


def patience_s(scaling: ScalingConfig) -> float:
    """For how long an exchange that turns both pools back has to help."""
    return 2 * scaling.cooldown_s


def share(
    scaling: ScalingConfig,
    pools: dict[Role, Pool],
    wishes: dict[Role, Wish],
    drained_cost: float,
    now_s: float,
) -> Shared:
    """The pair that serves the wishes best.

    Where one pool can only grow if the other gives, it gives by the most that it needed lately, and
    only if that helps by `hysteresis`; one whose need is not known gives nobody.
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
    kept = fit(scaling, recent, drained_cost=drained_cost, least=current) or current
    is_known = all(pool.need.num_workers is not None for pool in pools.values())
    if not is_known or _is_cooling(scaling, pools, now_s):
        return Shared(kept, Rule.BUDGET)
    needed = _needed(pools, wishes, scaling.grow_after_s, now_s)
    exchanged = _exchange(scaling, current, wanted, needed, drained_cost)
    if needed is None or exchanged is None:
        return Shared(kept, Rule.BUDGET)
    if _turns_back(pools, current, exchanged) and _gain(needed, current, exchanged) < TURNED:
        needed = _needed(pools, wishes, patience_s(scaling), now_s)
        exchanged = _exchange(scaling, current, wanted, needed, drained_cost)
    if exchanged is None:
        return Shared(kept, Rule.BUDGET, is_held=True)
    return Shared(exchanged, Rule.BUDGET)


def _exchange(
    scaling: ScalingConfig, current: Pair, wanted: Pair, needed: Pair | None, drained_cost: float
) -> Pair | None:
    """The pair for what is needed; None where it helps too little, or grows one unasked."""
    target = fit(scaling, needed, drained_cost=drained_cost) if needed is not None else None
    if needed is None or target is None or target == current:
        return None
    is_asked = target.prefill <= max(current.prefill, wanted.prefill) and (
        target.decode <= max(current.decode, wanted.decode)
    )
    is_better = _gain(needed, current, target) >= 1 + scaling.hysteresis
    return target if is_asked and is_better else None


def _gain(needed: Pair, before: Pair, after: Pair) -> float:
    """How many times smaller the shortage is after an exchange."""
    return shortage(needed, before) / shortage(needed, after)


def _turns_back(pools: dict[Role, Pool], current: Pair, target: Pair) -> bool:
    """Whether the pool that gives is the one that last grew, and the one that gets last shrank."""
    prefill, decode = target.prefill - current.prefill, target.decode - current.decode
    if prefill * decode >= 0:
        return False
    getting, giving = Role.PREFILL, Role.DECODE
    if decode > 0:
        getting, giving = giving, getting
    got, gave = pools[getting].history, pools[giving].history
    return got.shrunk_s > got.grown_s and gave.grown_s > gave.shrunk_s


def _needed(
    pools: dict[Role, Pool], wishes: dict[Role, Wish], span_s: float, now_s: float
) -> Pair | None:
    """What each pool is judged by in an exchange; None where that is not known.

    That is its wish where it grows or may not, and else the most that it needed in the span, though
    that be more than it has.
    """
    numbers = {}
    for role, wish in wishes.items():
        pool = pools[role]
        most = pool.history.most(span_s, now_s)
        if wish.num_workers > pool.view.num_workers or wish.rule is Rule.OTHER_STAGE:
            numbers[role] = wish.num_workers
        elif most is None or pool.view.has_stale:
            return None
        else:
            numbers[role] = max(most, 1)
    return _pair(numbers)


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
