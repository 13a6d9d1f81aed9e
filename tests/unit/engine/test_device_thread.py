"""The thread that owns the device computes with as many threads as it was assigned."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
from engine.device_thread import device_thread

def compute():
    a = torch.ones(700, 700)
    for _ in range(3):
        a = a @ a / 700
    return torch.get_num_threads()

before = len(os.listdir("/proc/self/task"))
for number in (1, 2, 4):
    device = device_thread(nice=0, num_threads=number, cores=None)
    said = device.submit(compute).result()
    print(number, said, len(os.listdir("/proc/self/task")) - before)
    device.shutdown()
"""


@pytest.mark.case("B-155")
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_worker_has_as_many_math_threads_as_it_was_assigned_whatever_the_environment_says():
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = [tuple(map(int, line.split())) for line in told.stdout.splitlines()]
    assert [(assigned, said) for assigned, said, _ in rows] == [(1, 1), (2, 2), (4, 4)]
    # The device's own thread, and the others of its team.
    assert [num_new for *_, num_new in rows] == [1, 2, 4]
