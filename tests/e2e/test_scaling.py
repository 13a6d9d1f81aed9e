"""A real cluster whose decode pool grows under load and shrinks after it; every step is told."""

import asyncio
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.completion import Completion
from deploy.cli import app
from deploy.local_cluster import LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

LATE_S = 90.0
LOOK_S = 0.25


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaling") / "decisions.jsonl"


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster, log: Path) -> LocalCluster:
    return start_cluster(
        tiny_model_directory,
        *("decode.max_num_sequences=2", "prefill.kv_cache=4MiB", "decode.kv_cache=4MiB"),
        "scaling.prefill={max_replicas: 1}",
        "scaling.decode={max_replicas: 2, target_wait_s: 0.05, target_step_s: 5.0}",
        *("scaling.interval_s=0.5", "scaling.grow_after_s=0.5", "scaling.shrink_after_s=3"),
        *("scaling.cooldown_s=0", f"scaling.log={log}"),
    )


async def decode_workers(client: AsyncClient) -> set[str]:
    return {worker.name for worker in await client.admin.workers() if worker.role == "decode"}


async def keep_busy(client: AsyncClient, until: asyncio.Event) -> list[Completion]:
    """Streams one after the other until `until` is set; what each ended with."""
    ended = []
    while not until.is_set():
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        async for chunk in client.generate((1, 2, 3, 4), sampling):
            if chunk.completion is not None:
                ended.append(chunk.completion)
    return ended


async def grow_and_shrink(address: str) -> list[Completion]:
    has_grown = asyncio.Event()
    async with AsyncClient(address) as client, asyncio.timeout(LATE_S):
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(keep_busy(client, has_grown)) for _ in range(6)]
            while await decode_workers(client) != {"decode-0", "decode-1"}:
                await asyncio.sleep(LOOK_S)
            has_grown.set()
        while len(await decode_workers(client)) > 1:
            await asyncio.sleep(LOOK_S)
    return [completion for stream in streams for completion in stream.result()]


def test_decode_grows_while_requests_wait_for_slots_and_shrinks_after(
    cluster: LocalCluster, log: Path
) -> None:
    started_s = time.monotonic()
    completions = asyncio.run(grow_and_shrink(cluster.address))
    assert len(completions) >= 6
    assert all(done.usage.num_output_tokens == 200 for done in completions)
    assert time.monotonic() - started_s < LATE_S
    told = CliRunner().invoke(app, ["scaling", "log", str(log)]).output
    assert "decode 1 -> 2 (late): requests wait" in told
    assert "decode 2 -> 1 (spare): no more were needed for 3 s" in told
    number = told.split()[0]
    explained = CliRunner().invoke(app, ["scaling", "explain", str(log), number]).output
    assert "oldest_wait_s" in explained
    asyncio.run(assert_nothing_left(cluster.address))


def test_pools_that_went_to_zero_are_woken_and_no_request_is_lost(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    async def sleep_and_wake(address: str) -> None:
        async with AsyncClient(address) as client, asyncio.timeout(LATE_S):
            while await client.admin.workers():
                await asyncio.sleep(LOOK_S)
            sampling = Sampling(max_tokens=3, ignore_eos=True)
            asked = [client.generate_once((1, 2, number), sampling) for number in range(6)]
            answers = await asyncio.gather(*asked)
            assert [len(answer.token_ids) for answer in answers] == [3] * 6

    cluster = start_cluster(
        tiny_model_directory,
        *("prefill.kv_cache=4MiB", "decode.kv_cache=4MiB", "router.max_wait_s=60"),
        "scaling.prefill={min_replicas: 0, max_replicas: 1}",
        "scaling.decode={min_replicas: 0, max_replicas: 1}",
        *("scaling.interval_s=0.5", "scaling.grow_after_s=0.5", "scaling.shrink_after_s=2"),
        *("scaling.idle_s=1", "scaling.cooldown_s=0"),
    )
    asyncio.run(sleep_and_wake(cluster.address))
