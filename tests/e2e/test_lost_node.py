"""Under Ray with two nodes, one of them is lost with all its workers: streams go on elsewhere."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from bench.parity import wait_until_ready
from core.config import load_config
from deploy.cluster import ray_cluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.e2e.test_survival import LATE_S, NUM_STREAMS, Stream, has_begun
from twophase.client import AsyncClient

SETUP = (
    *("router.port=0", "router.http_port=null", "prefill.replicas=2", "decode.replicas=2"),
    *("prefill.max_batch_tokens=64", "prefill.kv_cache=4MiB", "decode.kv_cache=16MiB"),
    *("engine.max_context_tokens=1024", "router.max_wait_s=60"),
)
# From the loss until four workers serve again; Ray itself needs several seconds on a busy machine.
BACK_S = 60.0
NODE: dict[str, Any] = {"num_cpus": 8, "object_store_memory": 80 << 20}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_streams_outlive_a_node_and_its_workers_come_back_on_the_other(
    tiny_model_directory: Path, nodes: Cluster
) -> None:
    other: Any = nodes.add_node(**NODE)
    nodes.wait_for_nodes()
    config = load_config(None, [f"model={tiny_model_directory}", *SETUP])

    async def run(address: str, *, is_node_lost: bool) -> tuple[list[Stream], float]:
        streams = [Stream(number) for number in range(NUM_STREAMS)]
        async with AsyncClient(address) as client, asyncio.timeout(LATE_S):
            await wait_until_ready(client)
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(stream.run(client))
                while is_node_lost and not has_begun(streams):
                    await asyncio.sleep(0.005)
                lost_s = time.monotonic()
                if is_node_lost:
                    await asyncio.to_thread(nodes.remove_node, other, allow_graceful=False)
            while len((await client.status()).workers) < 4:
                await asyncio.sleep(0.1)
        return streams, time.monotonic() - lost_s

    with ray_cluster(config, tell=lambda line: None, replace_lost=True) as address:
        expected, _ = asyncio.run(run(address, is_node_lost=False))
        streams, back_s = asyncio.run(run(address, is_node_lost=True))
        assert [stream.token_ids for stream in streams] == [s.token_ids for s in expected]
        failures = [why for s in streams if s.completion for why in s.completion.failures]
        assert any("-1" in why for why in failures)  # both second workers were on that node
        assert back_s < BACK_S
        asyncio.run(assert_nothing_left(address))
