"""Which fault comes next, and who is hit: never the last one of its pool that is up.

Where the last one is lost too, requests can do nothing but wait for the next, and a run shows how
fast workers start rather than whether streams survive. Pure: facts and a draw in, a decision out.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from core.settings.chaos import FaultKind


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to whom."""

    kind: FaultKind
    target: str


def next_fault(kinds: Sequence[FaultKind], up: Sequence[str], draw: random.Random) -> Fault | None:
    """A fault for one of the servers that are `up`; None if each is the last of its pool.

    Routers are a pool, too.
    """
    num_up = Counter(pool_of(server) for server in up)
    spare = [server for server in up if num_up[pool_of(server)] > 1]
    if not spare:
        return None
    return Fault(draw.choice(list(kinds)), draw.choice(spare))


def pool_of(server: str) -> str:
    """The pool that a server of a local cluster belongs to, by its name."""
    return server.partition("-")[0]
