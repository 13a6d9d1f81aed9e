"""KV memory that is reused or believed too early: wrong tokens, if nobody proved and fenced."""

import asyncio
import random
import time

import pytest

from core.errors import TransferFailed, TransferFailure
from tests.cases.by_hand import router_by_hand
from tests.cases.one_process import one_process, prompt_of, until
from tests.contract.faulty import Fault, FaultKind, Step

ONE_REQUEST = "64KiB"  # four blocks of 16 tokens
PIECE_A_LAYER = "transfer.piece=16384"  # one layer of four blocks
NUM_PROMPT_TOKENS, NUM_TOKENS = 56, 6


def slow_layers(seconds, numbers=range(1, 4)):
    return [Fault(Step.SEND, FaultKind.SLEEP, nth, seconds) for nth in numbers]


@pytest.mark.case("B-014")
async def test_the_next_owner_of_a_cancelled_request_s_blocks_is_never_overwritten(
    model, backend, reference
):
    # Two prefill workers: over one link, what B's writes would cover what A's late write spoilt.
    setup = (f"decode.kv_cache={ONE_REQUEST}", PIECE_A_LAYER, "prefill.replicas=2")
    draw = random.Random(14)
    async with one_process(model, backend, *setup) as cluster, router_by_hand(cluster) as router:
        for number in range(12):
            # 1 a layer of A takes its time
            a, b = f"a{number}", f"b{number}"
            cluster.faults.order(*slow_layers(draw.uniform(0.03, 0.1), numbers=[1]))
            router.reserve(a, prompt_of(40, number), max_tokens=24)
            sending = asyncio.create_task(router.prefill(a, "prefill-0"))
            await until(lambda: cluster.faults.num_struck > 0)
            # 2 B, to be read by the other worker, waits for the only blocks there are
            prompt = prompt_of(40, 1000 + number)
            router.reserve(b, prompt, max_tokens=24)
            # 3 the client of A leaves in mid-transfer
            router.cancel(a)
            sending.cancel()
            assert await router.serve(b, "prefill-1") == reference(prompt, 24)
            await asyncio.wait([sending])
        await cluster.nothing_is_left()


@pytest.mark.case("B-016")
async def test_prefill_reads_the_next_prompt_only_when_the_last_piece_of_this_one_has_gone(
    run, backend, reference
):
    async with run(backend, f"prefill.kv_cache={ONE_REQUEST}", PIECE_A_LAYER) as cluster:
        prefill = cluster.devices["prefill-0"]
        for number in range(0, 26, 2):
            num_sampled = len(prefill.sampled)
            cluster.faults.order(*slow_layers(0.005))
            prompts = [prompt_of(NUM_PROMPT_TOKENS, number + i) for i in range(2)]
            asked = [
                asyncio.create_task(cluster.ask(prompt, max_tokens=NUM_TOKENS))
                for prompt in prompts
            ]
            await until(lambda: cluster.faults.num_struck == 3)
            assert len(prefill.sampled) <= num_sampled + 1
            answers = await asyncio.gather(*asked)
            assert [a.token_ids for a in answers] == [reference(p, NUM_TOKENS) for p in prompts]
        await cluster.nothing_is_left()


@pytest.mark.case("B-017")
@pytest.mark.parametrize("backend", ["shm", "torch"])
async def test_load_steps_with_cancels_know_every_sequence_to_its_end(
    run, backend, reference, caplog
):
    draw = random.Random(17)
    prompts = [prompt_of(draw.choice((1, 15, 17, 60, 200)), number) for number in range(40)]
    for prompt in prompts:
        reference(prompt, NUM_TOKENS)
    num_right = 0

    async def keep_asking(until_s):
        nonlocal num_right
        while time.monotonic() < until_s:
            prompt = draw.choice(prompts)
            asking = asyncio.create_task(cluster.ask(prompt, max_tokens=NUM_TOKENS))
            if draw.random() < 0.1:
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                asking.cancel()
                await asyncio.wait([asking])
                continue
            assert (await asking).token_ids == reference(prompt, NUM_TOKENS)
            num_right += 1

    async with run(backend, "prefill.max_batch_tokens=64") as cluster:
        for num_at_once in (1, 8, 32, 8):
            until_s = time.monotonic() + 0.5
            await asyncio.gather(*(keep_asking(until_s) for _ in range(num_at_once)))
        await cluster.nothing_is_left()
        assert [record for record in caplog.records if record.levelname != "INFO"] == []
    assert num_right > 50


@pytest.mark.case("B-019")
async def test_decode_waits_for_the_last_layer_of_the_last_chunk(run, backend, reference):
    draw = random.Random(19)
    async with run(backend, "prefill.max_batch_tokens=256") as cluster:
        decode = cluster.devices["decode-0"]
        first = await cluster.ask(prompt_of(1500, 0), max_tokens=4)
        last = first.completion.transfer.num_pieces - 1
        assert last >= 5
        for number in range(1, 6):
            late_s = draw.uniform(0.02, 0.1)
            cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, last, late_s))
            num_steps = decode.num_steps
            started_s = time.monotonic()
            asked = asyncio.create_task(cluster.ask(prompt_of(1500, number), max_tokens=4))
            await until(lambda: cluster.faults.num_struck == 1)
            await asyncio.sleep(late_s / 2)
            assert decode.num_steps == num_steps
            answer = await asked
            assert time.monotonic() - started_s > late_s
            assert answer.token_ids == reference(prompt_of(1500, number), 4)
            assert answer.completion.transfer.num_pieces == last + 1
        await cluster.nothing_is_left()


LAYER_17 = 16
ONE_BLOCK = "transfer.piece=4096"  # a piece is one layer of one block


@pytest.mark.case("B-020")
async def test_a_layer_that_fails_on_its_way_fails_its_request_and_no_other(
    deep_model, deep_reference, backend
):
    prompts = [prompt_of(12, number) for number in range(4)]
    async with one_process(deep_model, backend, ONE_BLOCK) as cluster:
        num_failed = (await cluster.client.status()).kv.num_failed_handoffs
        decode = cluster.devices["decode-0"]
        # one of four requests, whose layers take turns on the link
        cluster.faults.order(Fault(Step.SEND, FaultKind.CORRUPT, nth=4 * LAYER_17))
        answers = await asyncio.gather(*(cluster.ask(p, max_tokens=4) for p in prompts))
        errors = [answer.error for answer in answers if answer.error]
        assert [(type(e), e.reason) for e in errors] == [(TransferFailed, TransferFailure.CHECKSUM)]
        right = [deep_reference(prompt, 4) for prompt in prompts]
        for answer, tokens in zip(answers, right, strict=True):
            assert answer.token_ids == (tokens[: len(answer.token_ids)] if answer.error else tokens)
            assert not answer.error or len(answer.token_ids) <= 1
        assert (await cluster.client.status()).kv.num_failed_handoffs == num_failed + 1
        assert decode.longest_share == 1
        await cluster.nothing_is_left()


@pytest.mark.case("B-020")
@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.CORRUPT, FaultKind.DROP])
async def test_layer_17_of_30_that_fails_in_the_sender_gives_no_token_and_a_clear_error(
    deep_model, deep_reference, backend, kind
):
    steps = (Step.SEND, Step.PIECE) if kind is FaultKind.DROP else (Step.SEND,)
    async with one_process(deep_model, backend, ONE_BLOCK) as cluster:
        num_steps = cluster.devices["decode-0"].num_steps
        cluster.faults.order(*(Fault(step, kind, nth=LAYER_17) for step in steps))
        failed = await cluster.ask(prompt_of(12, 1), max_tokens=4)
        assert cluster.faults.num_struck == len(steps)
        assert isinstance(failed.error, TransferFailed)
        assert failed.token_ids in ([], deep_reference(prompt_of(12, 1), 4)[:1])
        assert cluster.devices["decode-0"].num_steps == num_steps
        await cluster.nothing_is_left()
        # whatever became of the link, the next request is right
        answer = await cluster.ask(prompt_of(12, 1), max_tokens=4)
        assert answer.token_ids == deep_reference(prompt_of(12, 1), 4)
        await cluster.nothing_is_left()


@pytest.mark.case("B-022")
@pytest.mark.parametrize("backend", ["shm", "torch"])
async def test_the_last_of_many_answers_is_as_right_as_the_first(run, backend, reference):
    # three hundred in all, one after the other and eight at once
    draw = random.Random(22)
    prompts = [prompt_of(int(2000 ** draw.random()), number) for number in range(75)]
    setup = ("decode.kv_cache=20MiB", "prefill.kv_cache=3MiB", "prefill.max_batch_tokens=300")
    async with run(backend, *setup) as cluster:

        async def is_right(prompt):
            answer = await cluster.ask(prompt, max_tokens=4)
            return answer.token_ids == reference(prompt, 4)

        wrong = [n for n, prompt in enumerate(prompts) if not await is_right(prompt)]
        assert wrong == []
        slots = asyncio.Semaphore(8)

        async def is_right_among_others(prompt):
            async with slots:
                return await is_right(prompt)

        again = draw.sample(prompts, len(prompts))
        assert all(await asyncio.gather(*map(is_right_among_others, again)))
        await cluster.nothing_is_left()


@pytest.mark.case("B-023")
@pytest.mark.parametrize("num_between", [0, 50])
async def test_a_conversation_that_goes_on_after_its_blocks_were_reused_is_read_again(
    run, reference, num_between
):
    setup = ("decode.kv_cache=512KiB", "prefill.kv_cache=512KiB")  # 32 blocks each
    async with run("shm", *setup) as cluster:
        first = await cluster.ask(prompt_of(100, 0), max_tokens=20)
        for number in range(num_between):
            await cluster.ask(prompt_of(200, 1 + number), max_tokens=2)
        prompt = [*prompt_of(100, 0), *first.token_ids, *prompt_of(20, 1000)]
        second = await cluster.ask(prompt, max_tokens=20)
        assert second.token_ids == reference(prompt, 20)
        usage = second.completion.usage
        # the blocks of 16 tokens that lie there still, or none
        assert usage.num_decode_cached_tokens == (0 if num_between else 112)
        assert usage.num_prefill_cached_tokens == (0 if num_between else 96)
        await cluster.nothing_is_left()
