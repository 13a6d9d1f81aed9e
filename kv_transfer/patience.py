"""Waits for what can only be asked: a card's work, a write over RDMA."""

import time
from collections.abc import Callable

# Short at first, as a piece takes some 100 us; the longer it takes, the less a delay matters.
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3


def is_done_within(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until `is_done`, at most `timeout_s`; whether it is."""
    until_s = time.monotonic() + timeout_s
    sleep_s = SHORTEST_SLEEP_S
    while not is_done():
        if time.monotonic() > until_s:
            return False
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
    return True
