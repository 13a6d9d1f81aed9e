"""How quiet the machine is: a number measured while something else runs is no number.

`spin` takes each core for a moment and counts the time in which it did not run. `CpuMeter` tells,
for a span of a bench, how many cores went to processes that are not the bench's own, and how much
the hypervisor took.
"""

import os
import time
from dataclasses import dataclass

import psutil

# A read of the clock takes well under a microsecond; a longer pause means something else ran.
PAUSE_S = 20e-6


@dataclass(frozen=True, slots=True)
class Spin:
    """One core, spun: the share of time in which the loop stood still, and the longest time."""

    core: int
    stolen_share: float
    longest_ms: float


def spin(core: int, seconds: float) -> Spin:
    """Spin on one core for `seconds` at this process's niceness; restores the affinity."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        stolen_s = longest_s = 0.0
        previous_s = started_s = time.perf_counter()
        while previous_s - started_s < seconds:
            now_s = time.perf_counter()
            if now_s - previous_s > PAUSE_S:
                stolen_s += now_s - previous_s
                longest_s = max(longest_s, now_s - previous_s)
            previous_s = now_s
    finally:
        os.sched_setaffinity(0, cores)
    return Spin(core, stolen_s / (previous_s - started_s), longest_s * 1e3)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores used over a span: by this process and its children, by others, by other guests."""

    own_cores: float
    other_cores: float
    stolen_cores: float


class CpuMeter:
    """Measures from its making to `read`; the children must live until then."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s, self._stolen_s = _machine_s()
        self._own_s = _own_s()

    def read(self) -> CpuUse:
        """Use since the meter was made."""
        wall_s = time.monotonic() - self._started_s
        busy_s, stolen_s = _machine_s()
        own_s = _own_s() - self._own_s
        return CpuUse(
            own_s / wall_s,
            max((busy_s - self._busy_s - own_s) / wall_s, 0.0),
            (stolen_s - self._stolen_s) / wall_s,
        )


def _machine_s() -> tuple[float, float]:
    """CPU seconds of all processes, and those that the hypervisor gave to others."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    stolen_s = getattr(times, "steal", 0.0)
    # Guest time is part of user and nice time already.
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle_s - stolen_s - guest_s, stolen_s


def _own_s() -> float:
    me = psutil.Process()
    total_s = 0.0
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total_s += times.user + times.system
    return total_s
