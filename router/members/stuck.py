"""Workers that were given up in silence or without progress: their processes may live.

Whoever started them is told to replace them. One that was wedged is believed again once it has done
a step; one that was silent, as soon as it answers. Pure: facts and times in, lists out.
"""

from dataclasses import dataclass

from core.request import WorkerName
from core.worker import StuckWorker, WorkerInfo


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that was given up; num_steps is where a wedged one stood still."""

    name: WorkerName
    incarnation: str
    why: str
    since_s: float
    num_steps: int | None

    def is_wedged(self, info: WorkerInfo, num_steps: int) -> bool:
        """Whether the worker that answers is the one that stood still, and still does."""
        return info.incarnation == self.incarnation and num_steps == self.num_steps


class StuckWorkers:
    """Those that were given up, by the address at which each listened."""

    def __init__(self) -> None:
        self._by_address: dict[str, Stuck] = {}

    def note(self, address: str, stuck: Stuck) -> None:
        """It was given up."""
        self._by_address[address] = stuck

    def at(self, address: str) -> Stuck | None:
        """Who was given up there last."""
        return self._by_address.get(address)

    def forget(self, address: str) -> None:
        """It is believed again, or nobody looks for it any more; idempotent."""
        self._by_address.pop(address, None)

    def told(self, now_s: float) -> list[StuckWorker]:
        """For those who replace them."""
        return [
            StuckWorker(stuck.name, address, stuck.why, now_s - stuck.since_s)
            for address, stuck in self._by_address.items()
        ]
