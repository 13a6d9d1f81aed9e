"""The one thread that owns the device.

The event loop of a worker hands it one step at a time and goes on moving data meanwhile. Its
niceness is above that of the other threads, so that a woken I/O thread runs at once on a busy core
(measured on two cores: a gloo round trip of 0.1 ms instead of 2-4 ms); math threads that torch
starts from it inherit niceness and cores.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_NICENESS = 19


def device_thread(
    *, nice: int, num_threads: int, cores: Sequence[int] | None
) -> ThreadPoolExecutor:
    """An executor of one thread with this niceness, `num_threads` math threads and these cores.

    nice 0 and cores None leave things as the process has them. Where the system refuses (no
    permission, no such core), OSError comes out of the first call.
    """

    def prepare() -> None:
        thread_id = threading.get_native_id()
        if cores is not None:
            os.sched_setaffinity(thread_id, cores)
        if nice:
            niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + nice
            os.setpriority(os.PRIO_PROCESS, thread_id, min(niceness, MAX_NICENESS))
        torch.set_num_threads(num_threads)

    executor = ThreadPoolExecutor(1, thread_name_prefix="device")
    executor.submit(prepare).result()
    return executor
