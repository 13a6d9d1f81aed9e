"""A cluster as the live page is to show it: streams that come and go, and one that stood still."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import TwophaseError
from deploy.local_cluster import LocalCluster
from twophase.client import Client, Sampling

PROMPT_TOKENS = (20, 80, 300)
OUTPUT_TOKENS = (60, 200, 500)
STOOD_STILL_S = 0.7
# A client's name for its request, and an attempt on whoever looks at it.
HOSTILE_ID = "<img src=x onerror=alert(1)>/../?a#b"
STILL_ID = "stood-still"
LATE_S = 30.0


@contextmanager
def streams(address: str, num_streams: int, pause_s: float) -> Iterator[None]:
    """Streams of mixed lengths in some threads, each after a pause, while the context lasts."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=_keep_asking, args=(address, number, pause_s, stop))
        for number in range(num_streams)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LATE_S)


def _keep_asking(address: str, number: int, pause_s: float, stop: threading.Event) -> None:
    draw = random.Random(number)
    with Client(address) as client:
        for turn in range(10_000):
            prompt = [draw.randrange(3, 500) for _ in range(draw.choice(PROMPT_TOKENS))]
            sampling = Sampling(max_tokens=draw.choice(OUTPUT_TOKENS), ignore_eos=True)
            name = f"chat-{number}-turn-{turn + 1}"
            for _ in client.generate(prompt, sampling, request_id=name):
                if stop.is_set():
                    return
            if stop.wait(pause_s):
                return


def ask(address: str, request_id: str) -> None:
    """One short request from its begin to its end."""
    with Client(address) as client:
        sampling = Sampling(max_tokens=2, ignore_eos=True)
        client.generate_once([7, 8, 9], sampling, request_id=request_id)


def stand_still(cluster: LocalCluster) -> None:
    """A request whose decode worker is stopped in the middle of its answer, and goes on."""
    pid = cluster.children["decode-0"].process.pid
    with Client(cluster.address) as client:
        sampling = Sampling(max_tokens=60, ignore_eos=True)
        stream = client.generate([4, 5, 6], sampling, request_id=STILL_ID)
        for number, _ in enumerate(stream):
            if number == 10:
                os.kill(pid, signal.SIGSTOP)
                try:
                    time.sleep(STOOD_STILL_S)
                finally:
                    os.kill(pid, signal.SIGCONT)


def wait_for_ended(address: str, num_requests: int, timeout_s: float) -> None:
    """Return once so many have ended.

    Raises:
        TwophaseError: they have not in time.
    """
    late_s = time.monotonic() + timeout_s
    with Client(address) as client:
        while client.admin.diagnose().num_requests < num_requests:
            if time.monotonic() > late_s:
                raise TwophaseError(f"not {num_requests} requests ended within {timeout_s:g} s")
            time.sleep(0.1)
