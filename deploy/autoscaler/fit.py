"""The numbers of workers that bounds, ratio and budget allow and that serve a wish best."""

import math
from dataclasses import dataclass

from core.settings.scaling import ScalingConfig

# A budget of 0.3 holds three workers of 0.1, whatever the last bit says.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers of both pools; prefill is 0 where there is no such pool."""

    prefill: int
    decode: int


def shortage(wanted: Pair, given: Pair) -> float:
    """By how much the pool that is worse off falls short; 1 where neither does."""
    return max(1.0, _ratio(wanted.prefill, given.prefill), _ratio(wanted.decode, given.decode))


def is_allowed(scaling: ScalingConfig, pair: Pair, *, drained_cost: float = 0.0) -> bool:
    """Whether bounds, ratio and budget, less what draining workers take of it, allow `pair`."""
    if pair.decode == 0 and scaling.decode.min_replicas > 0:
        return False
    is_within = pair.decode == 0 or (
        scaling.decode.min_replicas <= pair.decode <= scaling.decode.max_replicas
    )
    cost = scaling.cost(pair.prefill, pair.decode) + drained_cost
    is_paid = scaling.budget is None or cost <= scaling.budget + ROUNDING
    return is_within and is_paid and pair.prefill in scaling.prefill_range(pair.decode)


def fit(
    scaling: ScalingConfig, wanted: Pair, *, drained_cost: float = 0.0, least: Pair = Pair(0, 0)
) -> Pair | None:
    """The allowed pair that shares the shortage most evenly, then costs least, then is nearest.

    Only pairs with at least `least` of each are looked at. None where nothing is allowed, maybe
    only while workers that drain take `drained_cost` of the budget. One pool alone is of no use:
    wanting one worker anywhere is wanting one in each.
    """
    if wanted == Pair(0, 0) and is_allowed(scaling, wanted, drained_cost=drained_cost):
        return wanted
    candidates = []
    fewest = max(scaling.decode.min_replicas, least.decode, 1)
    for num_decode in range(fewest, scaling.decode.max_replicas + 1):
        allowed = scaling.prefill_range(num_decode)
        most = _affordable(scaling, num_decode, drained_cost)
        allowed = range(max(allowed.start, least.prefill), min(allowed.stop, most + 1))
        if not allowed:
            continue
        num_prefill = min(max(wanted.prefill, allowed[0]), allowed[-1])
        pair = Pair(num_prefill, num_decode)
        distance = abs(num_decode - wanted.decode) + abs(num_prefill - wanted.prefill)
        rank = (shortage(wanted, pair), scaling.cost(num_prefill, num_decode), distance)
        candidates.append((rank, num_decode, pair))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _affordable(scaling: ScalingConfig, num_decode: int, drained_cost: float) -> int:
    """Most prefill workers that the budget leaves beside `num_decode`; -1 if not even none."""
    if scaling.budget is None:
        return 1024
    left = scaling.budget - drained_cost - scaling.cost(0, num_decode)
    if left < -ROUNDING:
        return -1
    return math.floor(left / scaling.prefill.cost + ROUNDING) if scaling.prefill is not None else 0


def _ratio(wanted: int, given: int) -> float:
    if wanted <= given:
        return 1.0
    return wanted / given if given else math.inf
