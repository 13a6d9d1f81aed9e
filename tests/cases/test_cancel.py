"""Whoever goes away, or is ended by id, stops both phases at once and leaves nothing behind."""

import asyncio

import pytest

from core.errors import Cancelled
from core.request import FinishReason
from tests.cases.one_process import prompt_of, until
from twophase.client import Sampling

CHUNK_TOKENS = 64
CHUNKED = ("prefill.max_batch_tokens=64",)
LONG = prompt_of(3000, 7)
SHORT = prompt_of(5, 8)
MANY = Sampling(max_tokens=2000, ignore_eos=True)


async def gone(task):
    """The client of `task` goes away."""
    task.cancel()
    await asyncio.wait([task])


async def worker_is_idle(cluster, name):
    statuses = await cluster.statuses()
    return not any(statuses[name].held.values())


async def until_idle(cluster, *names):
    async with asyncio.timeout(5):
        while not all([await worker_is_idle(cluster, name) for name in names]):
            await asyncio.sleep(0.01)


@pytest.mark.case("B-071")
async def test_prefill_stops_at_the_next_chunk_and_the_next_prompt_is_not_held_up(run, reference):
    async with run("shm", *CHUNKED) as cluster:
        prefill = cluster.devices["prefill-0"]
        asking = asyncio.create_task(cluster.ask(LONG, max_tokens=2))
        num_before = prefill.num_tokens
        await until(lambda: prefill.num_tokens > num_before + CHUNK_TOKENS)
        with prefill.held():
            await gone(asking)
            await asyncio.sleep(0.05)  # the running step ends; the next one is held
            num_at_cancel = prefill.num_tokens
            statuses = cluster.client.admin.requests
            async with asyncio.timeout(5):
                while await statuses():
                    await asyncio.sleep(0.01)
        answer = await cluster.ask(SHORT, max_tokens=4)
        assert answer.token_ids == reference(SHORT, 4)
        # At most the chunk that was given to the device before.
        assert prefill.num_tokens - num_at_cancel <= CHUNK_TOKENS + len(SHORT)
        await cluster.nothing_is_left()


@pytest.mark.case("B-073", "B-076")
async def test_rounds_of_mass_cancels_leave_no_work_and_the_next_request_is_served(run, reference):
    async with run("shm") as cluster:
        decode = cluster.devices["decode-0"]
        for number in range(3):
            prompts = [prompt_of(200, 1000 * number + n) for n in range(100)]
            asked = [asyncio.create_task(cluster.ask(p, max_tokens=500)) for p in prompts]
            await asyncio.sleep(0.05 + 0.2 * number)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            await cluster.nothing_is_left()
            num_steps = decode.num_steps
            answer = await cluster.ask(SHORT, max_tokens=4)
            assert answer.token_ids == reference(SHORT, 4)
            assert decode.num_steps - num_steps == 3


@pytest.mark.case("B-075")
async def test_no_handler_outlives_its_stream(run):
    async with run("shm") as cluster:
        await cluster.ask(SHORT, max_tokens=2)
        num_tasks = len(asyncio.all_tasks())
        for _ in range(4):
            asked = [
                asyncio.create_task(cluster.ask([3 + n, 9], max_tokens=500)) for n in range(50)
            ]
            decode = cluster.devices["decode-0"]
            num_steps = decode.num_steps
            await until(lambda d=decode, n=num_steps: d.num_steps > n + 3)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        await cluster.nothing_is_left()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks, within_s=1.0)


@pytest.mark.case("B-077")
async def test_a_client_that_leaves_a_unary_call_stops_decode_within_a_step(run):
    async with run("shm") as cluster:
        decode = cluster.devices["decode-0"]
        num_steps = decode.num_steps
        asking = asyncio.create_task(cluster.client.generate_once(SHORT, MANY))
        await until(lambda: decode.num_steps > num_steps + 5)
        await gone(asking)
        await until_idle(cluster, "decode-0", "prefill-0")
        num_at_end = decode.num_steps
        assert num_at_end < num_steps + 1000
        await asyncio.sleep(0.1)
        assert decode.num_steps == num_at_end
        await cluster.nothing_is_left()


@pytest.mark.case("B-079")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_cancelling_by_the_clients_id_stops_the_phase_that_works(run, phase):
    async with run("shm", *CHUNKED) as cluster:
        device = cluster.devices[f"{phase}-0"]
        num_steps = device.num_steps
        prompt = LONG if phase == "prefill" else SHORT
        asking = asyncio.create_task(
            cluster.ask(prompt, max_tokens=500, request_id="mine", timeout_s=30.0)
        )
        await until(lambda: device.num_steps > num_steps + 1)
        assert await cluster.client.cancel("mine")
        answer = await asking
        assert isinstance(answer.error, Cancelled)
        known = answer.error.completion
        assert known.finish_reason is FinishReason.ERROR
        assert known.usage.num_output_tokens == len(answer.token_ids)
        assert [await cluster.client.cancel(name) for name in ("mine", "unknown")] == [False] * 2
        await cluster.nothing_is_left()
        num_at_end = device.num_steps
        await asyncio.sleep(0.05)
        assert device.num_steps == num_at_end
