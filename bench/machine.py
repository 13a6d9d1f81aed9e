"""How quiet the machine is: a number measured while something else runs is no number.

`spin` takes each core for a moment and counts the time in which it did not run. `CpuMeter` tells,
for a span of a bench, how many cores went to processes that are not the bench's own, and how much
the hypervisor took. `read_gb_per_s` is what bounds decode: every step reads all weights once.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil

# A read of the clock takes well under a microsecond; a longer pause means something else ran.
PAUSE_S = 20e-6
# Several times what the caches of one core hold.
READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Spin:
    """One core, spun: the share of time in which the loop stood still, and the longest time."""

    core: int
    stolen_share: float
    longest_ms: float


def spin(core: int, seconds: float) -> Spin:
    """Spin on one core for `seconds` at this process's niceness; restores the affinity."""
    stolen_s = longest_s = 0.0
    with _pinned(core):
        previous_s = started_s = time.perf_counter()
        while previous_s - started_s < seconds:
            now_s = time.perf_counter()
            if now_s - previous_s > PAUSE_S:
                stolen_s += now_s - previous_s
                longest_s = max(longest_s, now_s - previous_s)
            previous_s = now_s
    return Spin(core, stolen_s / (previous_s - started_s), longest_s * 1e3)


def read_gb_per_s(core: int, num_bytes: int = READ_BYTES) -> float:
    """How fast one core reads memory: the best of three sums, in GB (10^9 bytes) per second."""
    values = np.ones(num_bytes // 8)
    with _pinned(core):
        seconds = []
        for _ in range(3):
            started_s = time.perf_counter()
            values.sum()
            seconds.append(time.perf_counter() - started_s)
    return values.nbytes / min(seconds) / 1e9


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """This thread on one core while the context lasts."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores used over a span: by this process and its children, by others, by other guests."""

    own_cores: float
    other_cores: float
    stolen_cores: float


class CpuMeter:
    """Measures from its making to `read`; children that ended count once they were waited for."""

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
        # Of those that it has waited for; only Linux tells.
        total_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total_s
