"""The assertion that ends every test that makes requests: nothing is left anywhere."""

import asyncio
import time
from typing import Any

from twophase.client import AsyncClient, ClusterStatus

SETTLE_S = 5.0


async def assert_nothing_left(address: str, **shown: Any) -> None:
    """Within SETTLE_S every count is zero and every block free, on the router and each worker.

    Blocks, quarantine, reservations, waiting and running requests, open transfers, handler
    tasks, mailboxes, prefill calls. `shown` is the key and TLS for a router that asks for them.
    """
    async with AsyncClient(address, **shown) as client:
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            status = await client.status()
            left = {what: count for what, count in status.held.items() if count}
            if not left and all_blocks_are_free(status):
                return
            if time.monotonic() > deadline_s:
                raise AssertionError(f"left after {SETTLE_S:g} s: {left or status.workers}")
            await asyncio.sleep(0.05)


def all_blocks_are_free(status: ClusterStatus) -> bool:
    """Every worker's blocks are in its free list (cached ones are)."""
    return all(worker.num_free_blocks == worker.num_total_blocks for worker in status.workers)
