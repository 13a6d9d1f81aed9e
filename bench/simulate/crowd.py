"""Workers of both phases on one host: each is slower while the other works."""

from collections.abc import Callable

from bench.simulate.machine import Machine
from core.worker import Role


class Crowd:
    """How many workers of each phase are busy; decode workers are told when prefill turns.

    A prefill step takes the pace that it begins with: it is short. Decode takes many steps at once.
    """

    def __init__(self, machine: Machine) -> None:
        self._crowding = {
            Role.PREFILL: machine.prefill_crowding,
            Role.DECODE: machine.decode_crowding,
        }
        self._num_busy = {role: 0 for role in Role}
        self._watchers: list[Callable[[], None]] = []

    def watch(self, retime: Callable[[], None]) -> None:
        """Call `retime` whenever prefill begins or ends to slow decode down."""
        if self._crowding[Role.DECODE] != 1:
            self._watchers.append(retime)

    def pace(self, role: Role) -> float:
        """How many times longer a step of this phase takes now."""
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return self._crowding[role] if self._num_busy[other] else 1.0

    def turned(self, role: Role, *, is_busy: bool) -> None:
        """One worker of this phase began to work, or has nothing to do; called in turns."""
        self._num_busy[role] += 1 if is_busy else -1
        if role is Role.PREFILL and self._num_busy[role] == int(is_busy):
            for retime in self._watchers:
                retime()
