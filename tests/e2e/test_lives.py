"""Many requests, cancelled at any moment, in every mode: right tokens and nothing left."""

import asyncio
import random
from pathlib import Path

import pytest

from bench.parity import SETUPS
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

NUM_REQUESTS = 200
NUM_CANCELLED = 50
NUM_AT_ONCE = 24
SMALL = ("decode.kv_cache=2MiB", "engine.max_context_tokens=1024")


@pytest.mark.parametrize(("name", "overrides"), SETUPS)
def test_two_hundred_mixed_requests_of_which_fifty_are_cancelled_leave_nothing(
    tiny_model_directory: Path, start_cluster: StartCluster, name: str, overrides: tuple[str, ...]
) -> None:
    cluster = start_cluster(tiny_model_directory, *SMALL, *overrides)

    num_ended = asyncio.run(_send_mixed_requests(cluster.address))

    assert num_ended >= NUM_REQUESTS - NUM_CANCELLED
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.case("B-107")
@pytest.mark.parametrize(("name", "overrides"), SETUPS)
def test_a_seeded_answer_is_the_same_alone_and_among_others(
    tiny_model_directory: Path, start_cluster: StartCluster, name: str, overrides: tuple[str, ...]
) -> None:
    cluster = start_cluster(tiny_model_directory, *SMALL, *overrides)

    alone, among_others = asyncio.run(_ask_alone_and_among_others(cluster.address))

    assert alone == among_others
    assert len(set(alone)) > 5
    asyncio.run(assert_nothing_left(cluster.address))


async def _send_mixed_requests(address: str) -> int:
    """How many of the requests ended by themselves."""
    draw = random.Random(7)
    cancelled = set(draw.sample(range(NUM_REQUESTS), NUM_CANCELLED))
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(client: AsyncClient, index: int) -> int:
        prompt = [draw.randrange(300) for _ in range(draw.choice((1, 15, 16, 17, 60, 400)))]
        sampling = Sampling(
            max_tokens=draw.choice((1, 2, 10, 40)),
            temperature=draw.choice((0.0, 0.8)),
            seed=index,
            ignore_eos=True,
        )
        limit_s = draw.uniform(0.0, 0.3) if index in cancelled else 60.0
        num_tokens = 0
        async with slots:
            try:
                async with asyncio.timeout(limit_s):
                    async for chunk in client.generate(prompt, sampling):
                        num_tokens += len(chunk.token_ids)
            except TimeoutError:
                assert index in cancelled
                return 0
        assert num_tokens == sampling.max_tokens
        return 1

    async with AsyncClient(address) as client:
        ended = await asyncio.gather(*(one(client, index) for index in range(NUM_REQUESTS)))
    return sum(ended)


async def _ask_alone_and_among_others(address: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sampling = Sampling(max_tokens=30, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)
    prompt = list(range(40, 90))

    async def answer(client: AsyncClient, seed_prompt: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        async for chunk in client.generate(seed_prompt, sampling):
            ids += chunk.token_ids
        return tuple(ids)

    async with AsyncClient(address) as client:
        alone = await answer(client, prompt)
        crowd = [answer(client, [i, *prompt]) for i in range(6)]
        among, *_ = await asyncio.gather(answer(client, prompt), *crowd)
    return alone, among
