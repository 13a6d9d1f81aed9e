"""A decode worker that stands still, or dies, while handoffs are on their way to it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from core.errors import DeadlineExceeded, Overloaded, PeerLost, TransferFailed
from deploy.local_cluster import local_cluster
from tests.cases.one_process import Answer, OneProcessCluster, prompt_of
from tests.contract.faulty import Script
from tests.e2e.nothing_left import SETTLE_S
from twophase.client import AsyncClient

SETUP = (
    *("router.port=0", "router.http_port=null", "router.on_failure=fail"),
    *("router.worker_timeout_s=3", "prefill.max_batch_tokens=128", "transfer.backend=torch"),
    *("decode.kv_cache=24MiB", "prefill.kv_cache=24MiB"),
)
STANDSTILL_S = 2.0
NUM_TOKENS = 4


@contextmanager
def decode_worker(model, hash_seed):
    """A decode worker that was started by hand, in an order of sets and dicts of its own."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "decode_worker", "--replica=1", f"model={model}"),
            *("decode.replicas=2", *SETUP),
        ],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        assert address
        yield address
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Cluster(OneProcessCluster):
    """The same in processes of their own, which signals can reach."""

    def __init__(self, processes, client):
        super().__init__(Script())
        self.address, self.client = processes.address, client
        self._processes = processes

    def signal(self, name, number):
        self._processes.children[name].process.send_signal(number)

    def ask_many(self, num_requests, first, **limits):
        """Long prompts whose handoffs take a while; their tasks."""
        return [
            asyncio.create_task(
                self.ask(prompt_of(1000, first + i), max_tokens=NUM_TOKENS, **limits)
            )
            for i in range(num_requests)
        ]

    async def until_prefill(self, is_true, within_s):
        """Wait until a fact of the prefill worker's status holds, without any new request."""
        async with asyncio.timeout(within_s):
            while not is_true((await self.statuses())["prefill-0"]):
                await asyncio.sleep(0.05)


def is_handing_over(status):
    return status.num_open_transfers > 1 and status.num_transfer_bytes > 0


def is_free(status):
    return status.num_free_blocks == status.num_total_blocks and not any(status.held.values())


async def stand_still_and_go_on(cluster, reference):
    asked = cluster.ask_many(4, 0)
    await cluster.until_prefill(is_handing_over, 10.0)
    cluster.signal("decode-0", signal.SIGSTOP)
    await asyncio.sleep(STANDSTILL_S)
    cluster.signal("decode-0", signal.SIGCONT)
    for number, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.token_ids == reference(prompt_of(1000, number), NUM_TOKENS)
    await cluster.nothing_is_left()


async def stand_still_beyond_the_deadline(cluster, reference):
    asked = cluster.ask_many(10, 10, timeout_s=2.0)
    await cluster.until_prefill(is_handing_over, 10.0)
    cluster.signal("decode-0", signal.SIGSTOP)
    answers: list[Answer] = await asyncio.gather(*asked)
    errors = [answer.error for answer in answers if answer.error]
    kinds = DeadlineExceeded | PeerLost | Overloaded
    assert errors and all(isinstance(error, kinds) for error in errors)
    # 1 caches that nobody takes are given up by a timer, while decode still stands and nobody asks
    await cluster.until_prefill(is_free, SETTLE_S)
    # 2 nobody is told that it works
    async with asyncio.timeout(10.0):
        while (await cluster.client.status()).is_ready:
            await asyncio.sleep(0.1)
    # 3 the same processes serve again
    cluster.signal("decode-0", signal.SIGCONT)
    await wait_until_ready(cluster.client)
    answer = await cluster.ask(prompt_of(1000, 10), max_tokens=NUM_TOKENS)
    assert answer.token_ids == reference(prompt_of(1000, 10), NUM_TOKENS)
    await cluster.nothing_is_left()


async def die_in_the_middle(cluster):
    asked = cluster.ask_many(16, 30)
    await cluster.until_prefill(is_handing_over, 10.0)
    cluster.signal("decode-0", signal.SIGKILL)
    killed_s = time.monotonic()
    answers: list[Answer] = await asyncio.gather(*asked)
    assert time.monotonic() - killed_s < SETTLE_S
    assert any(answer.error for answer in answers)
    assert all(isinstance(a.error, PeerLost | TransferFailed | None) for a in answers)
    await cluster.until_prefill(is_free, SETTLE_S)


async def serve_with_the_new_one(cluster, reference, address):
    await cluster.client.add_worker(address)
    await wait_until_ready(cluster.client)
    slots = asyncio.Semaphore(16)

    async def ask_once(number):
        async with slots:
            answer = await cluster.ask(prompt_of(40, 100 + number), max_tokens=NUM_TOKENS)
        assert answer.token_ids == reference(prompt_of(40, 100 + number), NUM_TOKENS)
        # found by no other key than that under which it was sent: nothing is computed again
        usage = answer.completion.usage
        assert (usage.num_transferred_tokens, usage.num_local_prefill_tokens) == (40, 0)

    await asyncio.gather(*map(ask_once, range(200)))
    await cluster.nothing_is_left()


@pytest.mark.case("B-005", "B-013", "B-029", "B-170")
async def test_handoffs_to_a_decode_worker_that_stands_still_or_dies(
    model, reference, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    config = load_config(None, [f"model={model}", *SETUP])
    with local_cluster(config, tell=lambda line: None, log_directory=tmp_path) as processes:
        async with AsyncClient(processes.address) as client:
            await wait_until_ready(client)
            cluster = Cluster(processes, client)
            await stand_still_and_go_on(cluster, reference)
            await stand_still_beyond_the_deadline(cluster, reference)
            await die_in_the_middle(cluster)
            with decode_worker(model, hash_seed="2") as address:
                await serve_with_the_new_one(cluster, reference, address)
