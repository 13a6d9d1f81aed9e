"""Pieces that could be taken for one another's, ends that could wait for each other, cut links."""

import asyncio
import time

import pytest

from core.errors import DeadlineExceeded, TransferFailed
from tests.cases.one_process import one_process, prompt_of, until
from tests.contract.faulty import Fault, FaultKind, Step

PIECE_A_LAYER = "transfer.piece=4096"
NUM_TOKENS = 3


@pytest.mark.case("B-166")
async def test_two_requests_of_equal_length_at_once_never_get_each_others_cache(
    run, backend, reference
):
    # On NCCL as on gloo: tags are not relied upon, each piece names its request and is checked.
    async with run(backend, PIECE_A_LAYER) as cluster:
        for number in range(0, 50, 2):
            prompts = [prompt_of(12, 100 + number + i) for i in range(2)]
            cluster.faults.order(Fault(Step.TAKE, FaultKind.SLEEP, nth=0, seconds=0.002))
            answers = await asyncio.gather(
                *(cluster.ask(p, max_tokens=NUM_TOKENS) for p in prompts)
            )
            assert [a.error for a in answers] == [None] * len(prompts)
            assert [a.token_ids for a in answers] == [reference(p, NUM_TOKENS) for p in prompts]
        await cluster.nothing_is_left()


@pytest.mark.case("B-168")
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_thirty_two_handoffs_at_once_on_crossing_links_never_stall(
    model, reference, backend, num_workers
):
    prompts = [prompt_of(48, 168 + number) for number in range(32)]
    for prompt in prompts:
        reference(prompt, NUM_TOKENS)
    pools = (f"prefill.replicas={num_workers}", f"decode.replicas={num_workers}")
    async with one_process(model, backend, *pools, PIECE_A_LAYER) as cluster:
        started_s = time.monotonic()
        answers = await asyncio.gather(*(cluster.ask(p, max_tokens=NUM_TOKENS) for p in prompts))
        assert time.monotonic() - started_s < 10.0
        assert [a.error for a in answers] == [None] * len(prompts)
        assert [a.token_ids for a in answers] == [reference(p, NUM_TOKENS) for p in prompts]
        pairs = {(a.completion.prefill_worker, a.completion.decode_worker) for a in answers}
        assert len(pairs) >= num_workers
        await cluster.nothing_is_left()


@pytest.mark.case("B-170")
async def test_a_link_that_stands_still_for_a_while_goes_on_and_the_answer_is_right(
    run, backend, reference
):
    async with run(backend, PIECE_A_LAYER) as cluster:
        cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, nth=5, seconds=0.3))
        started_s = time.monotonic()
        answer = await cluster.ask(prompt_of(48, 170), max_tokens=NUM_TOKENS)
        assert time.monotonic() - started_s > 0.3
        assert answer.token_ids == reference(prompt_of(48, 170), NUM_TOKENS)
        await cluster.nothing_is_left()


@pytest.mark.case("B-170")
async def test_a_link_that_stands_still_longer_than_the_request_may_take_ends_it(
    run, backend, reference
):
    async with run(backend, PIECE_A_LAYER) as cluster:
        cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, nth=5, seconds=0.4))
        late = await cluster.ask(prompt_of(48, 171), max_tokens=NUM_TOKENS, timeout_s=0.2)
        assert isinstance(late.error, DeadlineExceeded)
        assert late.token_ids in ([], reference(prompt_of(48, 171), 1))
        await cluster.nothing_is_left()
        answer = await cluster.ask(prompt_of(48, 171), max_tokens=NUM_TOKENS)
        assert answer.token_ids == reference(prompt_of(48, 171), NUM_TOKENS)


@pytest.mark.case("B-170")
async def test_a_link_that_is_cut_in_mid_transfer_is_made_again_for_the_next_request(
    run, backend, reference
):
    async with run(backend, PIECE_A_LAYER) as cluster:
        for number in range(3):
            prompt = prompt_of(48, 180 + number)
            cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, nth=5, seconds=0.05))
            asked = asyncio.create_task(cluster.ask(prompt, max_tokens=NUM_TOKENS))
            await until(lambda: cluster.faults.num_struck == 1)
            cluster.break_links()
            failed = await asked
            assert isinstance(failed.error, TransferFailed)
            assert failed.token_ids in ([], reference(prompt, 1))
            answer = await cluster.ask(prompt, max_tokens=NUM_TOKENS)
            assert answer.token_ids == reference(prompt, NUM_TOKENS)
            await cluster.nothing_is_left()
