"""Workers that start late, fail for a while or come back: nobody has to restart for their sake."""

import asyncio
from contextlib import ExitStack, suppress

import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from core.errors import PeerLost
from decode_worker.config import DecodeWorkerConfig
from decode_worker.server import serve as serve_decode
from deploy.ports import reserved_address
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.server import serve as serve_prefill
from router.config import FrontDoorConfig
from router.server import serve as serve_router
from tests.cases.one_process import LIMIT_S, SETUP, SOON_S, prompt_of
from twophase.client import AsyncClient, Sampling

NUM_TOKENS = 4
PAUSE_S = 0.2


@pytest.mark.case("B-065")
async def test_while_prefill_is_marked_bad_decode_is_asked_for_nothing_and_it_heals_by_itself(
    run, reference
):
    async with run("shm") as cluster:
        prefill, decode = cluster.devices["prefill-0"], cluster.devices["decode-0"]
        prefill.error = "broken"
        # 1 after some failures nothing reaches prefill any more, and decode hears of nothing
        errors = [
            str((await cluster.ask(prompt_of(40, i), max_tokens=NUM_TOKENS)).error)
            for i in range(10)
        ]
        # What prefill says may be overtaken by decode, which hears that the handoff was given up.
        given_up = "the sender gave the request up"
        num_tried = sum("broken" in error or given_up in error for error in errors)
        assert 1 <= num_tried < 10  # probes of readiness count as well
        assert all("prefill" in error or given_up in error for error in errors)
        (worker,) = [w for w in await cluster.client.admin.workers() if w.name == "prefill-0"]
        assert worker.state == "suspect"
        num_steps = decode.num_steps
        assert isinstance((await cluster.ask(prompt_of(40, 99))).error, PeerLost)
        assert decode.num_steps == num_steps
        # 2 once it is well, the first request after the back-off finds that out
        prefill.error = None
        async with asyncio.timeout(SOON_S):
            while (answer := await cluster.ask(prompt_of(40, 7), max_tokens=NUM_TOKENS)).error:
                await asyncio.sleep(0.05)
        assert answer.token_ids == reference(prompt_of(40, 7), NUM_TOKENS)
        assert answer.completion.usage.num_transferred_tokens == 40
        await cluster.nothing_is_left()


@pytest.mark.case("B-066")
async def test_of_three_prefill_workers_one_that_always_fails_is_soon_left_alone(run, reference):
    setup = ("prefill.replicas=3", "router.on_failure=resume")
    async with run("shm", *setup) as cluster:
        broken = cluster.devices["prefill-1"]
        broken.error = "broken"

        async def ask(number):
            answer = await cluster.ask(prompt_of(40, number), max_tokens=2)
            assert answer.error is None
            assert answer.token_ids == reference(prompt_of(40, number), 2)

        await asyncio.gather(*(ask(i) for i in range(12)))
        num_before = broken.num_steps
        for first in range(12, 112, 4):
            await asyncio.gather(*(ask(first + i) for i in range(4)))
        # Left alone it would have a third of the hundred; its trials come rarer and rarer.
        assert broken.num_steps - num_before <= 20
        await cluster.nothing_is_left()


async def test_a_decode_step_that_raises_costs_its_streams_no_token(run, reference):
    setup = ("decode.replicas=2", "router.on_failure=resume")
    async with run("shm", *setup) as cluster:
        asked = [
            asyncio.create_task(cluster.ask(prompt_of(40, i), max_tokens=100)) for i in range(4)
        ]
        await cluster.until_count("decode-1", "num_running_requests", bool)
        cluster.devices["decode-1"].error = "broken"
        answers = await asyncio.gather(*asked)
        for number, answer in enumerate(answers):
            assert answer.token_ids == reference(prompt_of(40, number), 100)
        failures = [why for answer in answers for why in answer.completion.failures]
        assert any("decode-1: the decode step failed: broken" in why for why in failures)
        await cluster.nothing_is_left()


@pytest.mark.case("B-068")
async def test_a_hundred_requests_in_the_moment_of_readiness_are_all_served(run, reference):
    right = reference(prompt_of(20, 68), 2)
    async with run("shm", "decode.kv_cache=8MiB", "prefill.kv_cache=8MiB") as cluster:
        answers = await asyncio.gather(
            *(cluster.ask(prompt_of(20, 68), max_tokens=2) for _ in range(100))
        )
        assert [answer.error for answer in answers] == [None] * 100
        assert all(answer.token_ids == right for answer in answers)
        await cluster.nothing_is_left()


@pytest.mark.case("B-069")
@pytest.mark.parametrize(
    "order", [("router", "decode", "prefill"), ("prefill", "decode", "router")], ids=lambda o: o[0]
)
async def test_servers_may_start_in_any_order_and_none_ends_for_want_of_the_others(model, order):
    with ExitStack() as stack:
        at = {name: reserved_address(stack) for name in ("decode", "prefill")}
        words = [f"model={model}", *SETUP, f"router.workers=[{at['decode']},{at['prefill']}]"]
        config = load_config(None, words)
        address = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        front, both = FrontDoorConfig.from_cluster(config), {"stop": stop}
        start = {
            "router": lambda: serve_router(front, **both, on_listening=address.set_result),
            "decode": lambda: serve_decode(
                DecodeWorkerConfig.from_cluster(config, listen=at["decode"]),
                **both,
                on_ready=lambda _: None,
            ),
            "prefill": lambda: serve_prefill(
                PrefillWorkerConfig.from_cluster(config, listen=at["prefill"]),
                **both,
                on_ready=lambda _: None,
            ),
        }
        servers = []
        try:
            for name in order:
                servers.append(asyncio.create_task(start[name]()))
                await asyncio.sleep(PAUSE_S)
                if name != order[-1] and address.done():
                    async with AsyncClient(await address) as client:
                        assert not (await client.status()).is_ready
            assert not any(server.done() for server in servers)
            async with AsyncClient(await asyncio.wait_for(address, SOON_S)) as client:
                await wait_until_ready(client)
                once = await client.generate_once(prompt_of(20, 69), Sampling(NUM_TOKENS))
                assert len(once.token_ids) == NUM_TOKENS
        finally:
            stop.set()
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.gather(*servers), LIMIT_S)
