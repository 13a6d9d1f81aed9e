"""What a controller does about the workers that it finds: pure.

A controller that was lost is followed by another, which knows nothing but the configuration and
the names of the actors that live. It keeps what there may be, starts what is missing and stops
what is too many; how many a pool that scales needs is for the autoscaler to say afterwards.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from core.config import ClusterConfig
from core.worker import Role


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers of a pool: to begin with, and the bounds within which it may be found later."""

    first: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Workers by name: those that are kept, to be started, and to be stopped."""

    adopted: tuple[str, ...]
    started: tuple[str, ...]
    stopped: tuple[str, ...]


def sizes_of(config: ClusterConfig) -> Mapping[Role, Sizes]:
    """How many workers each pool may have; a pool that there is not has none."""
    prefill = config.prefill_pool
    num_first = {Role.PREFILL: prefill.replicas if prefill else 0}
    num_first[Role.DECODE] = config.decode.replicas
    if config.scaling is None:
        return {role: Sizes(number, number, number) for role, number in num_first.items()}
    sizes = {Role.PREFILL: Sizes(0, 0, 0)}
    bounds = {Role.PREFILL: config.scaling.prefill, Role.DECODE: config.scaling.decode}
    for role, bound in bounds.items():
        if bound is not None:
            sizes[role] = Sizes(num_first[role], bound.min_replicas, bound.max_replicas)
    return sizes


def reconcile(
    sizes: Mapping[Role, Sizes], living: Collection[str], *, is_new: bool
) -> Reconciliation:
    """What to do about the workers named in `living`; is_new: nothing of the cluster was there."""
    adopted: list[str] = []
    started: list[str] = []
    stopped: list[str] = []
    for role in (Role.DECODE, Role.PREFILL):
        size = sizes[role]
        found = sorted(index for name in living for index in _indices(name, role))
        kept = found[: size.most]
        wanted = size.first if is_new else max(len(kept), size.least)
        free = (index for index in range(len(found) + wanted) if index not in found)
        missing = [next(free) for _ in range(wanted - len(kept))]
        adopted += [f"{role.value}-{index}" for index in kept]
        started += [f"{role.value}-{index}" for index in missing]
        stopped += [f"{role.value}-{index}" for index in found[size.most :]]
    return Reconciliation(tuple(adopted), tuple(started), tuple(stopped))


def _indices(name: str, role: Role) -> list[int]:
    """The number in the name of a worker of that role; empty for others."""
    kind, _, number = name.rpartition("-")
    return [int(number)] if kind == role.value and number.isdecimal() else []
