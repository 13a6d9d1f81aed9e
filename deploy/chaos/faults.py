"""Which fault comes next, and who is hit: never the last worker of its pool that is up.

Where the last one is lost too, requests can do nothing but wait for the next, and a run shows how
fast workers start rather than whether streams survive. Pure: facts and a draw in, a decision out.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from core.chaos import FaultKind
from core.request import WorkerName


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to whom."""

    kind: FaultKind
    worker: WorkerName


def next_fault(
    kinds: Sequence[FaultKind], up: Sequence[WorkerName], draw: random.Random
) -> Fault | None:
    """A fault for one of the workers that are `up`; None if each is the last of its pool."""
    num_up = Counter(pool_of(worker) for worker in up)
    spare = [worker for worker in up if num_up[pool_of(worker)] > 1]
    if not spare:
        return None
    return Fault(draw.choice(list(kinds)), draw.choice(spare))


def pool_of(worker: WorkerName) -> str:
    """The pool that a worker of a local cluster belongs to."""
    return worker.rpartition("-")[0]
