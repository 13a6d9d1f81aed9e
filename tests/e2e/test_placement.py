"""A burst that is too much for the cluster, and prompts that go where their blocks are."""

import asyncio
import random
from pathlib import Path

import pytest

from core.completion import Completion
from core.errors import Overloaded
from deploy.local_cluster import LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, ClusterStatus, Sampling

NUM_REQUESTS = 200
MAX_QUEUED = 20
MAX_QUEUE_S = 20.0
LATE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(
        tiny_model_directory,
        "prefill.replicas=2",
        *("prefill.kv_cache=4MiB", "decode.kv_cache=4MiB", "engine.max_context_tokens=2048"),
        "decode.max_num_sequences=4",
        f"router.max_queued_requests={MAX_QUEUED}",
        f"router.max_queue_s={MAX_QUEUE_S}",
    )


async def complete(client: AsyncClient, prompt: list[int], max_tokens: int) -> Completion:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    completion = None
    async for chunk in client.generate(tuple(prompt), sampling):
        completion = chunk.completion
    assert completion is not None
    return completion


def test_a_burst_ends_in_answers_after_bounded_waits_and_refusals_with_a_hint(
    cluster: LocalCluster,
) -> None:
    draw = random.Random(3)

    async def burst() -> list[Completion | BaseException]:
        async with AsyncClient(cluster.address) as client, asyncio.timeout(LATE_S):
            prompts = [[draw.randrange(300) for _ in range(20)] for _ in range(NUM_REQUESTS)]
            asked = (complete(client, prompt, 30) for prompt in prompts)
            return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(burst())
    answered = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert len(answered) + len(refused) == NUM_REQUESTS
    # Eight fit the slots, so many may wait; the others come while these are served.
    assert len(answered) >= 8 + MAX_QUEUED
    assert all(done.usage.num_output_tokens == 30 for done in answered)
    assert max(done.phases.place_s for done in answered) < MAX_QUEUE_S
    assert refused
    assert all(error.retry_after_s > 0 for error in refused)
    asyncio.run(assert_nothing_left(cluster.address))


def test_a_prompt_goes_to_the_worker_that_has_it_cached_and_the_usage_shows_it(
    cluster: LocalCluster,
) -> None:
    draw = random.Random(4)
    prompts = [[draw.randrange(300) for _ in range(1200)] for _ in range(2)]

    async def twice() -> list[list[Completion]]:
        async with AsyncClient(cluster.address) as client:
            first = await asyncio.gather(*(complete(client, prompt, 1) for prompt in prompts))
            again = [await complete(client, [*prompt, 5], 1) for prompt in prompts]
            return [first, again]

    first, again = asyncio.run(twice())
    # Each goes where it was, not where nothing is to be done.
    workers = [done.prefill_worker for done in first]
    assert [done.prefill_worker for done in again] == workers
    for done in again:
        assert done.usage.num_prefill_cached_tokens == 1200
        assert "1200 of this prompt cached" in done.placement
    asyncio.run(assert_nothing_left(cluster.address))


def test_workers_and_router_tell_what_those_who_scale_pools_need(cluster: LocalCluster) -> None:
    async def ask() -> ClusterStatus:
        async with AsyncClient(cluster.address) as client:
            await complete(client, list(range(40)), 8)
            return await client.status()

    status = asyncio.run(ask())
    (decode,) = [w.signals for w in status.workers if w.role == "decode"]
    assert decode.step_s is not None
    assert decode.queue_wait_p95_s is not None
    readers = [w.signals for w in status.workers if w.role == "prefill"]
    assert any(told.queue_wait_p95_s is not None for told in readers)
    assert any(told.tokens_per_s and told.bytes_per_s and told.max_bytes_per_s for told in readers)
    assert any(told.transfer_wait_s is not None for told in readers)
    assert status.demand.requests_per_s > 0
    assert status.demand.num_prompt_tokens is not None
    assert status.demand.decode_s is not None
