"""Wrong text after the handoff: layouts, formats, chunks, settings of one pool, other prompts."""

import asyncio
import dataclasses

import pytest

from core.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig
from core.errors import TransferFailed, TwophaseError
from tests.cases.by_hand import router_by_hand
from tests.cases.one_process import one_process, prompt_of

PROMPT = prompt_of(700, 31)


@pytest.mark.case("B-024")
async def test_fifty_prompts_of_repeated_phrases_give_the_tokens_of_one_process(
    run, backend, reference
):
    phrases = [prompt_of(24, number) for number in range(5)]
    prompts = [
        [*(phrases[number % 5] * (1 + number % 4)), *prompt_of(7, 2400 + number)]
        for number in range(50)
    ]
    async with run(backend, "prefill.max_batch_tokens=64") as cluster:
        slots = asyncio.Semaphore(8)

        async def is_right(prompt):
            async with slots:
                answer = await cluster.ask(prompt, max_tokens=16)
            return answer.token_ids == reference(prompt, 16)

        assert all(await asyncio.gather(*map(is_right, prompts)))
        await cluster.nothing_is_left()


@pytest.mark.case("B-031")
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64, 512, 4096])
async def test_every_chunk_size_gives_the_same_tokens_and_ships_the_same_bytes(
    run, reference, chunk_tokens
):
    async with run("shm", f"prefill.max_batch_tokens={chunk_tokens}") as cluster:
        num_steps = cluster.devices["prefill-0"].num_steps
        answer = await cluster.ask(PROMPT, max_tokens=8)
        assert answer.token_ids == reference(PROMPT, 8)
        assert cluster.devices["prefill-0"].num_steps - num_steps == -(-700 // chunk_tokens)
        assert answer.completion.transfer.num_bytes == 44 * (16 << 10)
        await cluster.nothing_is_left()


RIGHT, REFUSED = "right", "refused"
# What one pool alone may be told, and what becomes of it.
SETTINGS = {
    "transfer.piece=4096": RIGHT,
    "transfer.convert_dtype=true": RIGHT,
    "transfer.idle_timeout_s=1": RIGHT,
    "transfer.max_links=1": RIGHT,
    "transfer.connect_timeout_s=3": RIGHT,
    "transfer.backend=torch": REFUSED,
    "engine.dtype=bfloat16": REFUSED,
    "engine.block_size=8": RIGHT,
    "engine.max_context_tokens=512": RIGHT,
    "engine.nice=1": RIGHT,
    "prefill.tensor_parallel=2": RIGHT,
    "prefill.num_threads=2": RIGHT,
    "prefill.kv_cache=1MiB": RIGHT,
    "prefill.max_batch_tokens=16": RIGHT,
    "prefill.max_waiting_requests=1": RIGHT,
}
ELSEWHERE = {
    "replicas": "how many workers there are is no setting of one",
    "cores": "where a thread runs changes no byte",
    "dtype": "as engine.dtype",
    "block_size": "as engine.block_size",
    "max_num_sequences": "decode has it alone",
    "cuda_graphs": "decode has it alone",
    "device": "this machine may have the CPU alone",
    "gpus": "as device",
    "resources": "which machine a worker is on changes no byte",
    "step_log": "writes down what was done",
}


@pytest.mark.case("B-032")
def test_every_setting_of_a_worker_is_tried_in_one_pool_only():
    sections = (EngineConfig, PrefillConfig, DecodeConfig, TransferConfig)
    fields = {name for section in sections for name in section.model_fields}
    tried = {key.partition("=")[0].partition(".")[2] for key in SETTINGS}
    assert fields == tried | {*ELSEWHERE}, "a new setting belongs into SETTINGS"


@pytest.mark.case("B-032")
@pytest.mark.parametrize(("setting", "outcome"), SETTINGS.items())
async def test_a_setting_that_prefill_has_alone_is_refused_or_changes_no_token(
    model, reference, setting, outcome
):
    async with one_process(model, "shm", only_at_prefill=setting) as cluster:
        async with asyncio.timeout(20):
            while len((await cluster.client.status()).workers) < 2:
                await asyncio.sleep(0.01)
        answer = await cluster.ask(prompt_of(100, 32), max_tokens=8)
        if outcome == RIGHT:
            assert answer.token_ids == reference(prompt_of(100, 32), 8)
        else:
            assert isinstance(answer.error, TwophaseError)
            for value in (setting.partition("=")[2], "shm" if "backend" in setting else "float32"):
                assert value in str(answer.error)
        await cluster.nothing_is_left()


@pytest.mark.case("B-033")
@pytest.mark.parametrize("change", ["one token less", "one token more", "another in the middle"])
async def test_prefill_of_another_prompt_than_decode_reserved_for_fails_at_once(run, change):
    prompt = prompt_of(40, 33)
    other = {
        "one token less": prompt[:-1],
        "one token more": [*prompt, 3],
        "another in the middle": [*prompt[:20], 511 - prompt[20], *prompt[21:]],
    }[change]
    async with run("shm") as cluster, router_by_hand(cluster) as router:
        request = router.reserve("r", prompt)
        num_steps = cluster.devices["prefill-0"].num_steps
        wrong = dataclasses.replace(request, prompt_token_ids=tuple(other))
        with pytest.raises(TransferFailed, match="not the one for which decode-0 reserved"):
            await router.prefill("r", request=wrong)
        assert cluster.devices["prefill-0"].num_steps == num_steps
        router.cancel("r")
        await cluster.nothing_is_left()


@pytest.mark.case("B-034")
async def test_decode_computes_no_token_of_a_prompt_however_long_it_is(run, reference):
    async with run("shm", "decode.kv_cache=5MiB", "prefill.kv_cache=5MiB") as cluster:
        decode = cluster.devices["decode-0"]
        for num_tokens in (100, 1000, 4000, 4092):
            num_steps, num_computed = decode.num_steps, decode.num_tokens
            answer = await cluster.ask(prompt_of(num_tokens, num_tokens), max_tokens=4)
            assert answer.token_ids == reference(prompt_of(num_tokens, num_tokens), 4)
            assert (decode.num_steps, decode.num_tokens) == (num_steps + 3, num_computed + 3)
            usage = answer.completion.usage
            assert (usage.num_transferred_tokens, usage.num_local_prefill_tokens) == (num_tokens, 0)
        totals = (await cluster.client.status()).kv
        assert totals.num_local_prefill_tokens == 0
        await cluster.nothing_is_left()
