"""What all simulated workers share."""

from dataclasses import dataclass

from bench.simulate.agenda import Agenda
from bench.simulate.crowd import Crowd
from bench.simulate.fault import Faults
from bench.simulate.machine import Machine


@dataclass(frozen=True, slots=True)
class Site:
    """Time, what steps and moves take, who else works, and what goes wrong."""

    agenda: Agenda
    machine: Machine
    crowd: Crowd
    faults: Faults

    @property
    def now_s(self) -> float:
        """The time."""
        return self.agenda.now_s

    @property
    def link_bytes_per_s(self) -> float:
        """What a link carries now."""
        return self.machine.link_bytes_per_s * self.faults.link_share(self.now_s)
