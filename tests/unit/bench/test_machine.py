"""The check for a quiet machine."""

import os

from bench.machine import CpuMeter, read_gb_per_s, spin


def test_spinning_restores_the_affinity_and_counts_shares():
    cores = os.sched_getaffinity(0)

    spun = spin(min(cores), 0.01)

    assert os.sched_getaffinity(0) == cores
    assert 0.0 <= spun.stolen_share <= 1.0
    assert spun.longest_ms >= 0.0


def test_work_of_this_process_counts_as_its_own():
    meter = CpuMeter()
    # More than one tick of the kernel's CPU accounting.
    spin(min(os.sched_getaffinity(0)), 0.05)

    use = meter.read()

    assert use.own_cores > 0.0
    assert use.other_cores >= 0.0


def test_reading_memory_has_a_speed_and_restores_the_affinity():
    cores = os.sched_getaffinity(0)

    assert read_gb_per_s(min(cores), num_bytes=1 << 20) > 0.0
    assert os.sched_getaffinity(0) == cores
