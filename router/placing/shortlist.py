"""Whom placement looks at where a pool is large.

Of up to FEW workers, all. Of more, those that are asked for by name, because they hold most of the
prompt or served the session, and NUM_DRAWN drawn at random: the least loaded of some random ones
is nearly as good as that of all (the power of two choices: Mitzenmacher, IEEE TPDS 12(10), 2001;
more than two here, since each is cheap and a prompt that waits is not). So a request costs the
router the same in a pool of a thousand workers as in one of forty.

Pure: the draws are those of a seeded generator.
"""

import random
from collections.abc import Collection, Sequence
from typing import TypeVar

from router.placing.load import DecodeLoad, PrefillLoad

FEW = 32
NUM_DRAWN = 8

Load = TypeVar("Load", PrefillLoad, DecodeLoad)


class Shortlist:
    """Draws; the same ones in the same order for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def of(self, loads: Sequence[Load], asked_for: Collection[str]) -> Sequence[Load]:
        """`loads` if they are few; else those whose incarnations are `asked_for`, and some more."""
        if len(loads) <= FEW:
            return loads
        found = {load.incarnation: load for load in self._random.choices(loads, k=NUM_DRAWN)}
        if asked_for:
            found.update(
                (each.incarnation, each) for each in loads if each.incarnation in asked_for
            )
        return list(found.values())
