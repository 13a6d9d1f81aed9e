"""A decode worker that stops ships the KV caches of its streams: they go on, and nothing is read.

One cluster whose lost workers come back, so each test stops, or kills, what it likes. Pieces are
slow on purpose: what a test hits, it hits in the middle of a migration.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.parity import wait_until_ready
from core.completion import Completion
from core.config import load_config
from core.sampling import Constraint, ConstraintKind
from core.worker import KvTotals
from deploy.local_cluster import LocalCluster, local_cluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

BACK_S = 120.0
MAX_TOKENS = 300
NUM_TOKENS_BEFORE = 12
PROMPT_TOKENS = 90
SETUP = (
    *("router.port=0", "router.http_port=null", "prefill.replicas=1", "decode.replicas=2"),
    *("prefill.kv_cache=8MiB", "decode.kv_cache=16MiB", "engine.max_context_tokens=1024"),
    *("router.worker_timeout_s=3", "router.max_wait_s=100"),
    *("chaos.enabled=true", "chaos.piece_delay_s=0.1"),
)
LONG = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
KINDS = {
    "greedy": Sampling(**LONG),
    "seeded": Sampling(**LONG, temperature=0.9, top_k=8, seed=5, num_logprobs=2),
    "penalised": Sampling(**LONG, repetition_penalty=1.3, frequency_penalty=0.4),
    "constrained": Sampling(
        max_tokens=MAX_TOKENS, constraint=Constraint(ConstraintKind.REGEX, "[a-z]{290}")
    ),
    "three answers": Sampling(**LONG, temperature=0.8, top_k=4, seed=11, n=3),
}


@dataclass
class Stream:
    """What one client got, by answer."""

    kind: str
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    num_logprobs: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Each of its answers has some tokens."""
        num_answers = KINDS[self.kind].n or 1
        lengths = [len(token_ids) for token_ids in self.token_ids.values()]
        return len(lengths) == num_answers and min(lengths) >= NUM_TOKENS_BEFORE

    async def run(self, client: AsyncClient) -> None:
        """Read all of it."""
        first = list(KINDS).index(self.kind)
        prompt = [(7 * first + 3 * place) % 250 for place in range(PROMPT_TOKENS + first)]
        async for chunk in client.generate(prompt, KINDS[self.kind]):
            self.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
            self.num_logprobs += len(chunk.logprobs)
            if chunk.completion is not None:
                self.completions.append(chunk.completion)


Fault = Callable[[AsyncClient, list[Stream]], Awaitable[None]]


async def streams_with(cluster: LocalCluster, fault: Fault | None = None) -> list[Stream]:
    """One stream of each kind; once all are on their way, the fault comes."""
    streams = [Stream(kind) for kind in KINDS]
    async with AsyncClient(cluster.address) as client, asyncio.timeout(BACK_S):
        await wait_until_ready(client)
        while len(await pids(client)) < 3:
            await asyncio.sleep(0.05)
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(client))
            if fault is not None:
                while not all(stream.has_begun for stream in streams):
                    await asyncio.sleep(0.005)
                await fault(client, streams)
    await assert_nothing_left(cluster.address)
    return streams


async def pids(client: AsyncClient) -> dict[str, int]:
    """Process of each connected worker that takes requests."""
    status = await client.status(timeout_s=BACK_S)
    return {worker.name: worker.pid for worker in status.workers if not worker.is_draining}


async def stop(client: AsyncClient) -> str:
    """The decode worker that has most to do is stopped in order; its name."""
    serving = Counter(request.decode_worker for request in await client.admin.requests())
    (name, _), *_ = serving.most_common()
    os.kill((await pids(client))[name], signal.SIGTERM)
    return name


async def until_pushing(client: AsyncClient) -> None:
    """Return when the worker that stops has a KV cache on its way."""
    while True:
        workers = (await client.status()).workers
        if any(worker.is_draining and worker.num_open_transfers > 0 for worker in workers):
            return
        await asyncio.sleep(0.005)


@dataclass
class KillWhileMoving:
    """A decode worker is stopped and, in the middle of its migrations, killed, or the other is."""

    is_old: bool
    victim: str = ""

    async def __call__(self, client: AsyncClient, streams: list[Stream]) -> None:
        """The fault."""
        both = await pids(client)
        stopped = await stop(client)
        (other,) = {"decode-0", "decode-1"} - {stopped}
        self.victim = stopped if self.is_old else other
        await until_pushing(client)
        os.kill(both[self.victim], signal.SIGKILL)


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


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> dict[str, dict[int, list[int]]]:
    """Tokens of each stream in a run without faults."""
    return {stream.kind: stream.token_ids for stream in asyncio.run(streams_with(cluster))}


def moved(streams: list[Stream]) -> list[Completion]:
    """How the answers ended whose last attempt began with a migration."""
    done = [completion for stream in streams for completion in stream.completions]
    return [c for c in done if c.prefill_worker.startswith("decode") and c.transfer is not None]


async def facts(cluster: LocalCluster) -> tuple[KvTotals, int]:
    """What the router counted, and the steps of the prefill worker."""
    async with AsyncClient(cluster.address) as client:
        status = await client.status()
    steps = [worker.num_steps for worker in status.workers if worker.name == "prefill-0"]
    return status.kv, sum(steps)


def test_streams_move_with_their_kv_cache_and_nothing_is_read_again(
    cluster: LocalCluster, expected: dict[str, dict[int, list[int]]]
) -> None:
    num_steps_at_stop, stopped = [], []

    async def fault(client: AsyncClient, streams: list[Stream]) -> None:
        num_steps_at_stop.append((await facts(cluster))[1])
        stopped.append(await stop(client))
        while not any(stream.completions for stream in streams):
            await asyncio.sleep(0.005)
        num_steps_at_stop.append((await facts(cluster))[1])

    before, _ = asyncio.run(facts(cluster))
    streams = asyncio.run(streams_with(cluster, fault))
    after, _ = asyncio.run(facts(cluster))

    assert {stream.kind: stream.token_ids for stream in streams} == expected
    answers = moved(streams)
    assert answers and all(not c.failures for c in answers)
    for completion in answers:
        usage = completion.usage
        assert completion.placement.startswith(f"{stopped[0]} stops and ships the KV cache; ")
        assert completion.prefill_worker == stopped[0] != completion.decode_worker
        assert usage.num_prefill_cached_tokens == usage.num_prompt_tokens
        assert usage.num_transferred_tokens > 0 and usage.num_local_prefill_tokens == 0
        assert abs(completion.phases.unaccounted_s) < 0.2 * completion.phases.total_s
    # Only the probe of a changed cluster may be read meanwhile.
    assert num_steps_at_stop[1] - num_steps_at_stop[0] <= 2
    assert after.num_migrations - before.num_migrations == len(answers)
    moved_bytes = sum(c.transfer.num_bytes for c in answers if c.transfer)
    assert after.num_migrated_bytes - before.num_migrated_bytes == moved_bytes > 0
    (seeded,) = (stream for stream in streams if stream.kind == "seeded")
    assert seeded.num_logprobs == MAX_TOKENS


@pytest.mark.parametrize("is_old", [True, False])
def test_a_migration_that_breaks_off_ends_in_a_recompute(
    cluster: LocalCluster, expected: dict[str, dict[int, list[int]]], is_old: bool
) -> None:
    before, _ = asyncio.run(facts(cluster))
    fault = KillWhileMoving(is_old)
    streams = asyncio.run(streams_with(cluster, fault))
    after, _ = asyncio.run(facts(cluster))

    assert {stream.kind: stream.token_ids for stream in streams} == expected
    done = [completion for stream in streams for completion in stream.completions]
    assert any(fault.victim in why for completion in done for why in completion.failures)
    assert sum(dict(after.failed_migrations).values()) > sum(
        dict(before.failed_migrations).values()
    )
