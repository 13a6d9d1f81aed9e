"""Streams outlive their workers: each token once, and the tokens of a run without faults."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.clock import MonotonicClock
from core.completion import Completion
from core.errors import PeerLost
from deploy.local_cluster import LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import SETTLE_S, assert_nothing_left
from twophase.client import AsyncClient, Sampling
from twophase.peer import Peer

NUM_STREAMS = 8
MAX_TOKENS = 150
# Far enough into an answer that both phases are behind it, early enough that much is left.
NUM_TOKENS_BEFORE_FAULT = 20
LATE_S = 60.0


@dataclass
class Stream:
    """What one client got."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def prompt(self) -> list[int]:
        """Its own, of a length that takes several chunks."""
        return [(7 * self.number + 3 * place) % 250 for place in range(60 + 20 * self.number)]

    @property
    def sampling(self) -> Sampling:
        """Greedy and seeded in turn; half of each with penalties."""
        return Sampling(
            max_tokens=MAX_TOKENS,
            temperature=0.9 if self.number % 2 else 0.0,
            seed=self.number + 20,
            ignore_eos=True,
            repetition_penalty=1.2 if self.number % 4 < 2 else 1.0,
            frequency_penalty=0.3 if self.number % 4 < 2 else 0.0,
        )

    async def run(self, client: AsyncClient) -> None:
        """Read the whole answer."""
        async for chunk in client.generate(self.prompt, self.sampling):
            self.token_ids += chunk.token_ids
            self.completion = chunk.completion


async def run_streams(
    address: str, fault: tuple[LocalCluster, str, signal.Signals] | None = None
) -> list[Stream]:
    """All streams at once; when half of them are on their way, `fault` hits one worker."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    async with (
        AsyncClient(address) as client,
        asyncio.timeout(LATE_S),
        asyncio.TaskGroup() as tasks,
    ):
        for stream in streams:
            tasks.create_task(stream.run(client))
        if fault is not None:
            cluster, worker, sent = fault
            while not has_begun(streams):
                await asyncio.sleep(0.005)
            cluster.children[worker].process.send_signal(sent)
    return streams


def has_begun(streams: list[Stream]) -> bool:
    """Half of them have their first tokens."""
    lengths = sorted(len(stream.token_ids) for stream in streams)
    return lengths[NUM_STREAMS // 2] >= NUM_TOKENS_BEFORE_FAULT


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster) -> Iterator[LocalCluster]:
    yield start_cluster(
        tiny_model_directory,
        "prefill.replicas=2",
        "decode.replicas=3",
        "prefill.max_batch_tokens=64",
        "prefill.kv_cache=4MiB",
        "decode.kv_cache=16MiB",
        "engine.max_context_tokens=1024",
        "router.worker_timeout_s=1",
    )


@pytest.mark.case("B-059")
@pytest.mark.timeout(300)
def test_streams_go_on_when_workers_die_or_fall_silent(cluster: LocalCluster) -> None:
    expected = [stream.token_ids for stream in asyncio.run(run_streams(cluster.address))]
    assert all(len(token_ids) == MAX_TOKENS for token_ids in expected)
    # Each fault leaves one worker fewer; at the end one decode worker reads prompts as well.
    for worker, sent in (
        ("decode-0", signal.SIGKILL),
        ("prefill-0", signal.SIGKILL),
        ("decode-1", signal.SIGSTOP),
        ("prefill-1", signal.SIGSTOP),
    ):
        streams = asyncio.run(run_streams(cluster.address, (cluster, worker, sent)))
        assert [stream.token_ids for stream in streams] == expected, (worker, sent)
        completions = [stream.completion for stream in streams if stream.completion]
        assert len(completions) == NUM_STREAMS
        if worker.startswith("decode"):
            assert any(worker in why for done in completions for why in done.failures)
        asyncio.run(assert_nothing_left(cluster.address))
    for worker in ("decode-1", "prefill-1"):  # they would not hear a gentler signal
        cluster.children[worker].process.kill()
    streams = asyncio.run(run_streams(cluster.address))
    assert [stream.token_ids for stream in streams] == expected
    assert all(
        done and done.usage.num_transferred_tokens == 0
        for done in (stream.completion for stream in streams)
    )
    asyncio.run(assert_nothing_left(cluster.address))


def test_workers_free_what_a_dead_router_asked_for(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, "prefill.kv_cache=4MiB", "decode.kv_cache=4MiB")

    async def kill_the_router_in_the_middle() -> None:
        async with AsyncClient(cluster.address) as client:
            chunks = client.generate([1, 2, 3], Sampling(max_tokens=200, ignore_eos=True))
            await anext(chunks)
            cluster.children["router"].process.kill()
            with pytest.raises(PeerLost):
                async for _ in chunks:
                    pass
        async with asyncio.timeout(SETTLE_S):
            for name in ("prefill-0", "decode-0"):
                await _until_idle(Peer(cluster.children[name].address, MonotonicClock()))

    asyncio.run(kill_the_router_in_the_middle())


async def _until_idle(worker: Peer) -> None:
    while any((await worker.status(SETTLE_S)).held.values()):
        await asyncio.sleep(0.05)
    await worker.close()
