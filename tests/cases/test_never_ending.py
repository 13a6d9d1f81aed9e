"""Requests that would never end: every wait ends by itself, and everybody who waits is told."""

import asyncio
import time

import pytest

from core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from tests.cases.one_process import prompt_of, until
from tests.contract.faulty import Fault, FaultKind, Step

NUM_TOKENS = 4
FOUR_BLOCKS = "64KiB"


@pytest.mark.case("B-047")
async def test_ids_that_look_alike_are_told_apart_at_both_ends_of_the_handoff(run, reference):
    ids = ["a", "a-1", "a-11", "a#1", "a/1", "a-1#/a-11", "#", "/", "x" * 128]
    async with run("shm") as cluster:
        answers = await asyncio.gather(
            *(
                cluster.ask(prompt_of(40, i), request_id=name, max_tokens=NUM_TOKENS)
                for i, name in enumerate(ids)
            )
        )
        for number, answer in enumerate(answers):
            assert answer.error is None
            assert answer.token_ids == reference(prompt_of(40, number), NUM_TOKENS)
            assert answer.completion.request_id == ids[number]
            assert answer.completion.usage.num_transferred_tokens == 40
        refused = await cluster.ask(prompt_of(40, 0), request_id="x" * 300)
        assert isinstance(refused.error, InvalidRequest)
        await cluster.nothing_is_left()


@pytest.mark.case("B-048")
async def test_a_prefill_that_fails_or_refuses_is_told_at_once_and_decode_drops_its_blocks(run):
    async with run("shm", "prefill.max_waiting_requests=1") as cluster:
        prefill = cluster.devices["prefill-0"]
        prefill.error = "the device is on fire"
        started_s = time.monotonic()
        answer = await cluster.ask(prompt_of(40, 48), max_tokens=NUM_TOKENS)
        assert time.monotonic() - started_s < 5.0
        assert "the prefill step failed: the device is on fire" in str(answer.error)
        await cluster.nothing_is_left()
        prefill.error = None
        with prefill.held():
            asked = [
                asyncio.create_task(cluster.ask(prompt_of(40, i), max_tokens=NUM_TOKENS))
                for i in range(8)
            ]
            async with asyncio.timeout(5.0):
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(done.pop().result().error, Overloaded)
        await asyncio.wait(asked)
        await cluster.nothing_is_left()


@pytest.mark.case("B-051", "B-055")
async def test_the_deadline_of_a_request_is_that_of_all_its_waits(run, reference):
    pools = ("prefill.replicas=2", "decode.replicas=2", "transfer.piece=4096")
    async with run("shm", *pools) as cluster:
        # 1 one of four handoffs stands still; only its own request is late, and it ends in time
        answers = []
        while not any(answer.error for answer in answers):
            assert len(answers) < 20  # a probe of readiness may have met the fault
            cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, nth=3, seconds=0.8))
            started_s = time.monotonic()
            numbers = range(len(answers), len(answers) + 4)
            answers += await asyncio.gather(
                *(cluster.ask(prompt_of(40, i), max_tokens=2, timeout_s=0.5) for i in numbers)
            )
            assert time.monotonic() - started_s < 5.0
        late = [answer for answer in answers if answer.error]
        assert all(isinstance(answer.error, DeadlineExceeded) for answer in late)
        for number, answer in enumerate(answers):
            right = reference(prompt_of(40, number), 2)
            assert answer.token_ids == right[: len(answer.token_ids)]
            assert answer.error or answer.token_ids == right
        # 2 a prefill worker that does no step keeps nothing that its client does not wait for
        with cluster.devices["prefill-0"].held(), cluster.devices["prefill-1"].held():
            started_s = time.monotonic()
            answer = await cluster.ask(prompt_of(300, 51), max_tokens=NUM_TOKENS, timeout_s=0.5)
            assert isinstance(answer.error, DeadlineExceeded)
            assert 0.45 < time.monotonic() - started_s < 5.0
        await cluster.nothing_is_left()


@pytest.mark.case("B-053")
async def test_requests_that_need_each_others_blocks_take_turns(run, reference):
    # Two prompts fill the pool exactly; each needs a block more for its answer.
    async with run("shm", f"decode.kv_cache={FOUR_BLOCKS}") as cluster:
        async with asyncio.timeout(5.0):
            answers = await asyncio.gather(
                *(cluster.ask(prompt_of(32, i), max_tokens=9) for i in range(6))
            )
        for number, answer in enumerate(answers):
            assert answer.token_ids == reference(prompt_of(32, number), 9)
        await cluster.nothing_is_left()


@pytest.mark.case("B-056")
async def test_after_an_idle_time_links_that_were_closed_or_cut_are_made_again(run, reference):
    async with run("shm", "transfer.idle_timeout_s=0.2") as cluster:
        async with asyncio.timeout(5.0):
            while (await cluster.statuses())["prefill-0"].links:
                await asyncio.sleep(0.05)
        for number in range(3):
            answer = await cluster.ask(prompt_of(40, number), max_tokens=NUM_TOKENS, timeout_s=5.0)
            assert answer.token_ids == reference(prompt_of(40, number), NUM_TOKENS)
            cluster.break_links()
            await until(lambda: cluster.num_open_senders == 0)
        await cluster.nothing_is_left()
