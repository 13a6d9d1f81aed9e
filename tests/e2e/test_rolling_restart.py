"""Workers are stopped, lost or stuck in turn, under load: each comes back, and no stream fails."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from core.listing import WorkerState
from core.worker import LinkStatus
from deploy.local_cluster import LocalCluster, local_cluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.e2e.test_survival import NUM_STREAMS, Stream
from twophase.client import AsyncClient, ClusterStatus, Sampling

BACK_S = 40.0
# Prefill workers that are stopped in mid-transfer, one after the other.
NUM_STOPS, NUM_QUICK_STOPS = 20, 2
SETUP = (
    *("router.port=0", "router.http_port=null", "prefill.replicas=2", "decode.replicas=2"),
    *("prefill.max_batch_tokens=64", "prefill.kv_cache=4MiB", "decode.kv_cache=16MiB"),
    *("engine.max_context_tokens=1024", "router.worker_timeout_s=3"),
)


@pytest.fixture(scope="module")
def cluster(
    tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    config = load_config(None, [f"model={tiny_model_directory}", *SETUP])
    logs = tmp_path_factory.mktemp("logs")
    with local_cluster(
        config, tell=lambda line: None, log_directory=logs, replace_lost=True
    ) as cluster:
        yield cluster
        children = list(cluster.children.values())
    assert all(child.process.returncode == 0 for child in children)


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> dict[int, list[int]]:
    """Tokens of each stream in a run without faults."""
    return {stream.number: stream.token_ids for stream in asyncio.run(under_load(cluster))}


class Load:
    """Streams without a pause: whoever ends one begins it again."""

    def __init__(self, client: AsyncClient) -> None:
        self.done: list[Stream] = []
        self._client = client
        self._is_over = False

    async def one_after_another(self, number: int) -> None:
        """Run stream `number` again and again until the load is over."""
        while not self._is_over or all(stream.number != number for stream in self.done):
            stream = Stream(number)
            await stream.run(self._client)
            self.done.append(stream)

    def end(self) -> None:
        """Let each stream come to its end."""
        self._is_over = True


async def in_mid_transfer(client: AsyncClient, names: set[str]) -> None:
    """Wait until each of these workers has begun a handoff that is not sealed."""
    async with asyncio.timeout(BACK_S):
        while True:
            status = await client.status(timeout_s=BACK_S)
            pushing = {worker.name for worker in status.workers if worker.num_open_transfers}
            if names <= pushing:
                return


async def restart(
    client: AsyncClient, sent: dict[str, int], *, is_in_transfer: bool = False
) -> None:
    """Send the signals and wait until another incarnation of each serves and takes requests."""
    pids = await workers(client)
    if is_in_transfer:
        await in_mid_transfer(client, {*sent})
    for name, number in sent.items():
        os.kill(pids[name], number)
    async with asyncio.timeout(BACK_S):
        while True:
            now = await workers(client)
            if all(now.get(name) not in (None, pids[name]) for name in sent):
                return
            await asyncio.sleep(0.1)


async def workers(client: AsyncClient) -> dict[str, int]:
    """Process of each connected worker that takes requests."""
    status: ClusterStatus = await client.status(timeout_s=BACK_S)
    return {worker.name: worker.pid for worker in status.workers if not worker.is_draining}


async def num_migrations(address: str) -> int:
    """Answers that moved with their KV cache."""
    async with AsyncClient(address) as client:
        return (await client.status()).kv.num_migrations


async def links(client: AsyncClient) -> dict[tuple[str, str], LinkStatus]:
    """Every link by its two ends, once each worker is ready."""
    async with asyncio.timeout(BACK_S):
        while {w.state for w in await client.admin.workers()} != {WorkerState.READY}:
            await asyncio.sleep(0.05)
    status = await client.status(timeout_s=BACK_S)
    prefill = [worker for worker in status.workers if worker.role == "prefill"]
    return {(worker.name, link.peer): link for worker in prefill for link in worker.links}


def num_closed_links(cluster: LocalCluster) -> int:
    """Links that decode workers have told the end of."""
    logs = cluster.log_directory.glob("decode-*.log")
    return sum(log.read_text().count(" closed: ") for log in logs)


async def under_load(
    cluster: LocalCluster, *sent: dict[str, int], is_in_transfer: bool = False
) -> list[Stream]:
    """Send signals to workers, one group after another, while streams run; all that ran."""
    async with AsyncClient(cluster.address) as client:
        await wait_until_ready(client)
        load = Load(client)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(load.one_after_another(number))
            for group in sent:
                await restart(client, group, is_in_transfer=is_in_transfer)
            load.end()
    return load.done


@pytest.mark.timeout(180)
def test_no_stream_fails_while_every_worker_is_restarted(
    cluster: LocalCluster, expected: dict[int, list[int]]
) -> None:
    halves = [{f"decode-{i}": signal.SIGTERM, f"prefill-{i}": signal.SIGTERM} for i in range(2)]
    streams = asyncio.run(under_load(cluster, *halves))

    assert len(streams) > NUM_STREAMS
    assert all(stream.token_ids == expected[stream.number] for stream in streams)
    assert asyncio.run(num_migrations(cluster.address)) > 0
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.case("B-158")
@pytest.mark.timeout(600)
def test_prefill_workers_that_stop_in_mid_transfer_cost_no_stream_and_no_decode_worker(
    cluster: LocalCluster, expected: dict[int, list[int]], is_thorough: bool
) -> None:
    async def decode_pids() -> dict[str, int]:
        async with AsyncClient(cluster.address) as client:
            return {n: pid for n, pid in (await workers(client)).items() if n.startswith("decode")}

    before = asyncio.run(decode_pids())
    num_stops = NUM_STOPS if is_thorough else NUM_QUICK_STOPS
    stops = [{f"prefill-{number % 2}": signal.SIGTERM} for number in range(num_stops)]
    streams = asyncio.run(under_load(cluster, *stops, is_in_transfer=True))

    assert all(stream.token_ids == expected[stream.number] for stream in streams)
    assert asyncio.run(decode_pids()) == before
    assert len(before) == 2
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.case("B-165")
@pytest.mark.timeout(180)
def test_links_are_made_and_measured_before_the_load_which_makes_none(
    cluster: LocalCluster,
) -> None:
    async def load_until_all_are_used() -> None:
        async with AsyncClient(cluster.address) as client, asyncio.timeout(BACK_S):
            await wait_until_ready(client)
            before, num_closed = await links(client), num_closed_links(cluster)
            pairs = {(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)}
            assert {*before} == pairs
            assert all(link.num_bytes and link.latency_s is not None for link in before.values())
            draw, unused = random.Random(5), pairs
            while unused:
                prompts = [[draw.randrange(250) for _ in range(100)] for _ in range(16)]
                answers = [client.generate_once(p, Sampling(max_tokens=4)) for p in prompts]
                await asyncio.gather(*answers)
                after = await links(client)
                unused = {p for p in pairs if after[p].num_bytes == before[p].num_bytes}
            assert {*after} == pairs
            # Each request found its link: none was made again.
            assert num_closed_links(cluster) == num_closed

    asyncio.run(load_until_all_are_used())
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.case("B-060")
@pytest.mark.timeout(180)
def test_a_killed_and_a_stopped_worker_are_replaced(
    cluster: LocalCluster, expected: dict[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    lost = {"decode-0": signal.SIGKILL, "prefill-1": signal.SIGSTOP}
    streams = asyncio.run(under_load(cluster, lost))

    assert all(stream.token_ids == expected[stream.number] for stream in streams)
    assert "decode-0 ended: it was ended by SIGKILL" in caplog.text
    assert "prefill-1 is killed: it has said nothing for 3 s" in caplog.text
    assert "prefill-1 is back at" in caplog.text
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.timeout(180)
def test_a_worker_that_answers_but_does_no_step_is_killed_and_replaced(
    tiny_model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = ("mode=chunked", "decode.tensor_parallel=2", "decode.kv_cache=8MiB")
    limits = ("router.wedged_after_s=2", "router.max_wait_s=60")
    ports = ("router.port=0", "router.http_port=null")
    config = load_config(None, [f"model={tiny_model_directory}", *ports, *setup, *limits])
    sampling = Sampling(max_tokens=100, ignore_eos=True)

    async def run(address: str, *, worker: psutil.Process | None = None) -> list[int]:
        token_ids: list[int] = []
        async with AsyncClient(address) as client, asyncio.timeout(2 * BACK_S):
            await wait_until_ready(client)
            async for chunk in client.generate([1, 2, 3], sampling):
                if not token_ids and worker is not None:
                    # Its second rank stands still: its loop answers, its step does not end.
                    (rank,) = worker.children()
                    rank.suspend()
                token_ids += chunk.token_ids
        return token_ids

    with local_cluster(
        config, tell=lambda line: None, log_directory=tmp_path, replace_lost=True
    ) as cluster:
        expected = asyncio.run(run(cluster.address))
        worker = psutil.Process(cluster.children["decode-0"].process.pid)
        ranks = worker.children()
        assert asyncio.run(run(cluster.address, worker=worker)) == expected
        asyncio.run(assert_nothing_left(cluster.address))
        assert "decode-0 is killed: wedged: no step for 2 s while work waits" in caplog.text
        # The rank that stood still ended with its leader.
        assert psutil.wait_procs([worker, *ranks], timeout=5)[1] == []
