"""KV memory and small fixed tables that are never given back: what holds them, and until when."""

import asyncio
import contextlib
import contextvars
import gc
import os
import random
import time

import psutil
import pytest

from core.errors import InvalidRequest, Overloaded
from core.events.step import StepFacts
from core.worker import RequestFailed
from tests.cases.by_hand import router_by_hand
from tests.cases.one_process import prompt_of, until
from tests.contract.faulty import Fault, FaultKind, Step

FOUR_BLOCKS = "64KiB"


def resident_bytes():
    return psutil.Process().memory_info().rss


# The log of steps is bounded, far above what a test does; cancelled timers go after a while.
BOUNDED = {StepFacts, asyncio.TimerHandle, contextvars.Context}


def num_objects():
    """Containers that Python keeps: flat where the allocators' own caches are not."""
    gc.collect()
    return sum(type(kept) not in BOUNDED for kept in gc.get_objects())


def num_open():
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


async def until_open(most):
    """Return once no more than `most` file descriptors are open; fails after a while."""
    for _ in range(20):
        if num_open() <= most:
            return
        # Not at each look: a collection takes longer than the loop needs to close what is over.
        gc.collect()
        await asyncio.sleep(0.5)
    raise AssertionError(f"{num_open()} are open, of {most}")


async def cancel(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.case("B-002")
async def test_what_decode_has_no_room_for_is_refused_before_prefill_computes_it(run):
    async with run("shm", f"decode.kv_cache={FOUR_BLOCKS}") as cluster:
        prefill = cluster.devices["prefill-0"]
        num_steps = prefill.num_steps
        for number in range(50):
            answer = await cluster.ask(prompt_of(80, number), max_tokens=4)
            assert isinstance(answer.error, InvalidRequest)
        assert prefill.num_steps == num_steps
        await cluster.nothing_is_left()


@pytest.mark.case("B-002")
async def test_what_decode_lets_nobody_wait_for_is_refused_before_anything_is_computed(
    run, reference
):
    setup = (f"decode.kv_cache={FOUR_BLOCKS}", "decode.max_waiting_requests=1")
    async with run("shm", *setup) as cluster, router_by_hand(cluster) as router:
        # 1 one holds every block, one waits for them
        for name in ("holding", "waiting"):
            router.reserve(name, prompt_of(50, 0), max_tokens=9)
        await router.reservation("holding")
        # 2 the others are told so before they could be sent to prefill
        for number in range(50):
            router.reserve(f"{number}", prompt_of(50, 2), max_tokens=9)
            assert isinstance((await router.heard(f"{number}", RequestFailed)).error, Overloaded)
        # 3 and are no burden to those
        for name in ("holding", "waiting"):
            assert await router.serve(name) == reference(prompt_of(50, 0), 9)
        await cluster.nothing_is_left()


@pytest.mark.case("B-004")
async def test_a_thousand_cancelled_while_they_wait_at_prefill_leave_every_table_empty(
    run, reference
):
    setup = ("prefill.kv_cache=512KiB", "decode.kv_cache=8MiB", "transfer.max_links=1")
    async with run("shm", *setup) as cluster:
        prefill = cluster.devices["prefill-0"]
        kept = []
        for number in range(4):
            num_sampled = len(prefill.sampled)
            async with router_by_hand(cluster) as router:
                with prefill.held():
                    names = [f"{number}-{i}" for i in range(250)]
                    for i, name in enumerate(names):
                        router.reserve(name, prompt_of(8, 250 * number + i))
                    asked = [asyncio.create_task(router.prefill(name)) for name in names]
                    await cluster.until_count("prefill-0", "num_handler_tasks", lambda n: n == 250)
                    await cancel(asked)
                    await cluster.until_count("prefill-0", "num_handler_tasks", lambda n: n == 0)
                for name in names:
                    router.cancel(name)
                await cluster.nothing_is_left()
            # those that the held step was about to read, and no more
            assert len(prefill.sampled) - num_sampled <= 32
            del router, asked
            kept.append(num_objects())
        answer = await cluster.ask(prompt_of(8, -1), max_tokens=4)
        assert answer.token_ids == reference(prompt_of(8, -1), 4)
        assert kept[-1] - kept[1] < 250
        await cluster.nothing_is_left()


@pytest.mark.case("B-007")
async def test_nobody_is_preempted_and_who_leaves_the_queue_takes_no_memory_along(run, reference):
    async with run("shm", f"decode.kv_cache={FOUR_BLOCKS}") as cluster:
        resident = []
        async with router_by_hand(cluster) as router:
            for number in range(20):
                for name in ("running", "waiting"):
                    router.reserve(f"{name} {number}", prompt_of(50, number), max_tokens=9)
                # all its blocks were its own from the start: pressure takes none of them away
                serving = asyncio.create_task(router.serve(f"running {number}"))
                await cluster.until_count("decode-0", "num_waiting_requests", bool)
                router.cancel(f"waiting {number}")
                assert await serving == reference(prompt_of(50, number), 9)
                await cluster.nothing_is_left()
                resident.append(resident_bytes())
        assert max(resident[3:]) < 1.05 * resident[2]


@pytest.mark.case("B-008")
async def test_six_hundred_ordinary_requests_leave_no_record_and_no_complaint(
    run, reference, caplog
):
    prompts = [prompt_of(8, number) for number in range(100)]
    async with run("shm", "router.history=50") as cluster:
        slots = asyncio.Semaphore(32)

        async def one(number):
            async with slots:
                answer = await cluster.ask(prompts[number % 100], max_tokens=2)
            assert answer.token_ids == reference(prompts[number % 100], 2)

        kept = []
        for _ in range(2):
            await asyncio.gather(*(one(number) for number in range(300)))
            await cluster.nothing_is_left()
            kept.append(num_objects())
        assert kept[1] - kept[0] < 300  # a record that stays is one for each of three hundred
        complaints = [record for record in caplog.records if record.levelname != "INFO"]
        assert complaints == []


@pytest.mark.case("B-009")
async def test_the_same_prompt_again_ships_its_last_block_only_and_frees_both_sides(run, backend):
    async with run(backend) as cluster:
        first, second = [await cluster.ask(prompt_of(64, 7), max_tokens=3) for _ in range(2)]
        assert first.token_ids == second.token_ids
        assert first.completion.transfer.num_bytes == 4 * second.completion.transfer.num_bytes
        assert second.completion.usage.num_decode_cached_tokens == 48
        await cluster.nothing_is_left()


@pytest.mark.case("B-010")
async def test_cancels_while_the_link_is_being_made_count_nothing_twice(run, reference):
    draw = random.Random(10)
    async with run("shm", "transfer.max_links=1") as cluster:
        await cluster.ask(prompt_of(8, 0), max_tokens=2)
        before = num_open()
        # 1 five hundred leave while the only link is down and its handshake takes long
        cluster.faults.order(Fault(Step.ACCEPT, FaultKind.SLEEP, nth=None, seconds=0.05))
        for _ in range(5):
            cluster.break_links()
            asked = [
                asyncio.create_task(cluster.ask(prompt_of(8, i), max_tokens=2)) for i in range(100)
            ]
            await asyncio.sleep(draw.uniform(0.05, 0.2))
            await cancel(asked)
            await cluster.nothing_is_left()
        cluster.faults.order()
        # 2 as many as there are slots are served at once
        prompts = [prompt_of(8, 1000 + number) for number in range(64)]
        answers = await asyncio.gather(*(cluster.ask(prompt, max_tokens=8) for prompt in prompts))
        assert [a.token_ids for a in answers] == [reference(prompt, 8) for prompt in prompts]
        await cluster.nothing_is_left()
        # 3 no end of a link that nobody wanted any more is kept
        assert sum(len(s.links) for s in (await cluster.statuses()).values()) == 2
        await until_open(before + 2)


@pytest.mark.case("B-010")
async def test_a_link_that_is_made_when_nobody_waits_for_it_any_more_is_closed(run, backend):
    async with run(backend) as cluster:
        for number in range(1, 3):
            cluster.faults.order(Fault(Step.CONNECT, FaultKind.DELAY, seconds=0.1))
            cluster.break_links()
            await until(lambda: cluster.num_open_senders == 0)
            asked = asyncio.create_task(cluster.ask(prompt_of(8, number), max_tokens=2))
            # its end is there, but the thread that made it has not returned
            await until(lambda: cluster.num_open_senders == 1)
            await cancel([asked])
            await until(lambda: cluster.num_open_senders == 0)
            await cluster.nothing_is_left()
        assert (await cluster.ask(prompt_of(8, 0), max_tokens=2)).error is None
        await cluster.nothing_is_left()


@pytest.mark.case("B-012")
async def test_a_client_that_leaves_between_prefill_and_decode_frees_both_in_two_seconds(
    run, backend
):
    async with run(backend) as cluster:
        cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, nth=None, seconds=0.03))

        async def leave_after_the_first_token(number):
            chunks = cluster.client.generate(prompt_of(40, number))
            async with contextlib.aclosing(chunks):
                assert len((await anext(chunks)).token_ids) == 1

        num_steps = cluster.devices["decode-0"].num_steps
        for number in range(0, 12, 4):
            await asyncio.gather(*map(leave_after_the_first_token, range(number, number + 4)))
            started_s = time.monotonic()
            await cluster.nothing_is_left()
            assert time.monotonic() - started_s < 2.0
        assert cluster.devices["decode-0"].num_steps <= num_steps + 12
