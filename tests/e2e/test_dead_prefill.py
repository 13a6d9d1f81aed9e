"""A prefill worker is killed in mid-transfer while every client cancels: decode loses no block."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import TwophaseError
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Client, Sampling

# Of each of two backends; the first of them only, unless the run is thorough.
NUM_ROUNDS, NUM_QUICK_ROUNDS = 10, 2
NUM_STREAMS = 20
NUM_PROMPT_TOKENS = 500
SETUP = (
    "prefill.kv_cache=8MiB",
    "decode.kv_cache=24MiB",
    "prefill.max_batch_tokens=128",
    "router.on_failure=fail",
)


@contextmanager
def _prefill_worker(model: Path, replica: int, *overrides: str) -> Iterator[tuple[str, int]]:
    """A prefill worker that was started by hand: its address and process id."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "prefill_worker", f"--replica={replica}"),
            *(f"model={model}", f"prefill.replicas={replica + 1}", *overrides),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address
        yield address, process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.case("B-001", "B-061")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["shm", "torch"])
def test_blocks_are_back_after_every_round_of_kill_and_cancel(
    tiny_model_directory: Path, start_cluster: StartCluster, backend: str, is_thorough: bool
) -> None:
    overrides = (*SETUP, f"transfer.backend={backend}")
    cluster = start_cluster(tiny_model_directory, *overrides)
    draw = random.Random(3)
    # The cluster's own prefill worker goes first; the rounds bring their own.
    cluster.children["prefill-0"].process.send_signal(signal.SIGKILL)
    with Client(cluster.address) as client:
        decode_pid = next(w.pid for w in client.status().workers if w.role == "decode")

    for number in range(NUM_ROUNDS if is_thorough else NUM_QUICK_ROUNDS):
        with _prefill_worker(tiny_model_directory, number + 1, *overrides) as (address, pid):
            asyncio.run(_round(cluster.address, address, pid, draw))
        asyncio.run(assert_nothing_left(cluster.address))

    with _prefill_worker(tiny_model_directory, 99, *overrides) as (address, pid):
        tokens = asyncio.run(_one_ordinary_request(cluster.address, address))
        asyncio.run(assert_nothing_left(cluster.address))
    with Client(cluster.address) as client:
        assert decode_pid in {worker.pid for worker in client.status().workers}
    assert tokens == 10


async def _round(router: str, prefill: str, pid: int, draw: random.Random) -> None:
    async with AsyncClient(router) as client:
        await client.add_worker(prefill)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(_stream(client, draw)) for _ in range(NUM_STREAMS)]
            await asyncio.sleep(draw.uniform(0.02, 0.5))
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
            for stream in streams:
                stream.cancel()
        await client.remove_worker(prefill)


async def _stream(client: AsyncClient, draw: random.Random) -> None:
    prompt = [draw.randrange(300) for _ in range(NUM_PROMPT_TOKENS)]
    try:
        async for _ in client.generate(prompt, Sampling(max_tokens=100, ignore_eos=True)):
            pass
    except TwophaseError:
        pass  # the kill was faster than the cancel


async def _one_ordinary_request(router: str, prefill: str) -> int:
    async with AsyncClient(router) as client:
        await client.add_worker(prefill)
        chunks = client.generate([1, 2, 3], Sampling(max_tokens=10, ignore_eos=True))
        num_tokens = sum([len(chunk.token_ids) async for chunk in chunks])
        await client.remove_worker(prefill)
        return num_tokens
