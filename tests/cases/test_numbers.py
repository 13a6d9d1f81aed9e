"""Numbers that people act on: each is what happened, no more and no less."""

import asyncio
import logging

import pytest

from core.errors import TransferFailed
from tests.cases.one_process import prompt_of
from tests.contract.faulty import Fault, FaultKind, Step

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
BLOCK_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * BLOCK_SIZE * 4


async def kv_totals(cluster):
    return (await cluster.client.status()).kv


@pytest.mark.case("B-121")
async def test_each_failed_handoff_is_counted_once(run):
    async with run("shm") as cluster:
        await cluster.ask(prompt_of(20, 0), max_tokens=2)
        before = await kv_totals(cluster)
        faults = [
            *[Fault(Step.PIECE, FaultKind.CORRUPT)] * 2,
            *[Fault(Step.SEND, FaultKind.RAISE)] * 3,
        ]
        for number, fault in enumerate(faults, start=1):
            cluster.faults.order(fault)
            answer = await cluster.ask(prompt_of(20, number), max_tokens=2)
            assert isinstance(answer.error, TransferFailed)
            cluster.faults.order()
            await cluster.nothing_is_left()
        after = await kv_totals(cluster)
        assert after.num_failed_handoffs == before.num_failed_handoffs + len(faults)
        assert after.num_sealed_handoffs == before.num_sealed_handoffs


@pytest.mark.case("B-122")
async def test_after_all_were_cancelled_at_once_the_gauges_are_zero_and_work_is_sent_again(
    run, reference
):
    async with run("shm") as cluster:
        asked = [
            asyncio.create_task(cluster.ask(prompt_of(20, number), max_tokens=400))
            for number in range(64)
        ]
        await cluster.until_count("decode-0", "num_running_requests", bool)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await cluster.nothing_is_left()
        for worker in (await cluster.statuses()).values():
            assert worker.num_waiting_requests == worker.num_running_requests == 0
            assert worker.num_used_blocks == worker.num_waiting_prompt_tokens == 0
        for worker in await cluster.client.admin.workers():
            assert worker.num_requests == worker.num_prompt_tokens == 0
        answer = await cluster.ask(prompt_of(20, 100), max_tokens=4)
        assert answer.token_ids == reference(prompt_of(20, 100), 4)


@pytest.mark.case("B-124", "B-127")
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_what_was_moved_is_no_prefix_hit_and_its_bytes_are_those_of_all_ranks(run, num_ranks):
    prompt = prompt_of(40, 7)
    async with run("shm", f"decode.tensor_parallel={num_ranks}") as cluster:
        first, again = [(await cluster.ask(prompt, max_tokens=3)).completion for _ in range(2)]
        assert first.usage.num_decode_cached_tokens == first.usage.num_prefill_cached_tokens == 0
        assert first.usage.num_transferred_tokens == 40
        assert first.transfer.num_bytes == 3 * BLOCK_BYTES
        for usage in (first.usage, again.usage):
            assert usage.num_decode_cached_tokens + usage.num_transferred_tokens == 40
            assert usage.num_prefill_cached_tokens <= 40
        assert again.usage.num_decode_cached_tokens == 32
        assert again.transfer.num_bytes == BLOCK_BYTES
        moved = sum(worker.num_transfer_bytes for worker in (await cluster.statuses()).values())
        # both ends count what went over their link; the probes before were of one block or two
        assert moved >= 2 * 4 * BLOCK_BYTES and moved % (2 * BLOCK_BYTES) == 0
        await cluster.nothing_is_left()


@pytest.mark.case("B-126")
async def test_output_tokens_are_those_that_were_sent_however_it_ended(run, reference):
    prompt = prompt_of(20, 3)
    right = reference(prompt, 8)
    async with run("shm") as cluster:
        for max_tokens in (1, 2, 8):
            answer = await cluster.ask(prompt, max_tokens=max_tokens)
            assert answer.completion.usage.num_output_tokens == len(answer.token_ids) == max_tokens
        stopped = await cluster.ask(prompt, max_tokens=8, stop_token_ids=(right[3],))
        assert stopped.completion.usage.num_output_tokens == right.index(right[3]) + 1
        # an error before the first token, and one after it
        device = cluster.devices["prefill-0"]
        step, device._step = device._step, broken
        failed = await cluster.ask(prompt_of(20, 4), max_tokens=8)
        device._step = step
        assert failed.error.completion.usage.num_output_tokens == len(failed.token_ids) == 0
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        failed = await cluster.ask(prompt_of(20, 5), max_tokens=8)
        assert isinstance(failed.error, TransferFailed)
        assert failed.error.completion.usage.num_output_tokens == len(failed.token_ids) <= 1
        await cluster.nothing_is_left()


def broken(*arguments):
    raise RuntimeError("ordered")


@pytest.mark.case("B-129")
async def test_one_id_leads_through_the_logs_of_all_three(run, caplog):
    caplog.set_level(logging.INFO)
    async with run("shm") as cluster:
        await cluster.ask(prompt_of(20, 1), max_tokens=3, request_id="whole")
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        await cluster.ask(prompt_of(20, 2), max_tokens=3, request_id="broken")
        cluster.faults.order()
        await cluster.nothing_is_left()
    said = [(record.name, record.getMessage()) for record in caplog.records]
    whole = {who for who, what in said if "request whole" in what}
    assert whole == {"twophase.router", "twophase.prefill_worker", "twophase.decode_worker"}
    # prefill says nothing of a call that the router took back before it heard of the failure
    broken = {who for who, what in said if "request broken" in what}
    assert broken >= {"twophase.router", "twophase.decode_worker"}
