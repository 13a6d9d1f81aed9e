"""Values at and beyond every edge: refused by name, or of a documented meaning; no harm is done."""

import asyncio
import math
import time

import grpc
import pytest

from core.errors import InvalidRequest
from tests.cases.one_process import prompt_of
from twophase.client import Sampling
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc

PROMPT = prompt_of(30, 90)
VOCAB_SIZE = 512
CONTEXT = 512
SMALL_CONTEXT = (f"engine.max_context_tokens={CONTEXT}",)
ODD = (math.nan, math.inf, -math.inf, -1.0, 1e308)
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


async def refused(client, prompt, **sampling):
    """The refusal of a request; it has to come, and soon."""
    started_s = time.monotonic()
    with pytest.raises(InvalidRequest) as refusal:
        await client.generate_once(prompt, Sampling(**sampling))
    assert time.monotonic() - started_s < 5.0
    return refusal.value


@pytest.mark.case("B-091", "B-092")
async def test_prompts_of_no_length_and_of_the_contexts_length(run, reference):
    async with run("shm", *SMALL_CONTEXT) as cluster:
        neighbours = [
            asyncio.create_task(cluster.ask(prompt_of(9, n), max_tokens=200)) for n in range(4)
        ]
        for empty in ("", []):
            assert (await refused(cluster.client, empty)).field == "prompt"
        for blank in (" ", "\n"):
            assert len((await cluster.ask(blank, max_tokens=2)).token_ids) == 2
        fitting = prompt_of(CONTEXT - 1, 91)
        answer = await cluster.ask(fitting, max_tokens=1)
        assert answer.token_ids == reference(fitting, 1)
        num_tokens = cluster.devices["prefill-0"].num_tokens
        for too_long in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            error = await refused(cluster.client, prompt_of(too_long, 92))
            assert error.field == "prompt"
            assert str(too_long) in error.value and str(CONTEXT - 1) in error.limit
        assert cluster.devices["prefill-0"].num_tokens == num_tokens
        for n, task in enumerate(neighbours):
            assert (await task).token_ids == reference(prompt_of(9, n), 200)
        await cluster.nothing_is_left()


@pytest.mark.case("B-094")
async def test_no_odd_number_passes_a_range_check(run, reference):
    async with run("shm") as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        neighbour = asyncio.create_task(cluster.ask(PROMPT, max_tokens=300))
        for name, (low, high) in RANGES.items():
            for value in ODD:
                sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True, **{name: value})
                request = pb.GenerateRequest(
                    prompt_token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling
                )
                call = stub.GenerateOnce(pb.GenerateOnceRequest(request=request), timeout=10)
                if low <= value <= high:
                    assert len((await call).answer.token_ids) == 2
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call
                assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refusal.value.details().startswith(f"{name} is ")
        zero = await cluster.ask(PROMPT, max_tokens=4, temperature=-0.0)
        assert zero.token_ids == reference(PROMPT, 4)
        assert (await neighbour).token_ids == reference(PROMPT, 300)
        await cluster.nothing_is_left()


@pytest.mark.case("B-096", "B-098", "B-106")
async def test_ids_and_counts_beyond_their_limits_are_refused_by_name(run, reference):
    async with run("shm") as cluster:
        neighbour = asyncio.create_task(cluster.ask(PROMPT, max_tokens=300))
        for token_id in (VOCAB_SIZE, 2**31, 2**32 - 1):
            stops = {"stop_token_ids": (5, token_id), "min_tokens": 2, "max_tokens": 4}
            assert (await refused(cluster.client, PROMPT, **stops)).field == "stop_token_ids[1]"
            bias = {"logit_bias": ((token_id, 1.0),), "min_tokens": 2, "max_tokens": 4}
            assert "logit_bias" in (await refused(cluster.client, PROMPT, **bias)).field
        with pytest.raises(ValueError, match="range"):  # no field can hold it
            await cluster.client.generate_once(PROMPT, Sampling(stop_token_ids=(-1,)))
        assert (await refused(cluster.client, PROMPT, max_tokens=0)).field == "max_tokens"
        for num_logprobs in (0, 1, 5, 20):
            answer = await cluster.client.generate_once(
                PROMPT, Sampling(max_tokens=2, num_logprobs=num_logprobs, ignore_eos=True)
            )
            assert [len(each.top) for each in answer.logprobs] == [num_logprobs] * 2
        for num_logprobs in (21, 100, 49152):
            error = await refused(cluster.client, PROMPT, num_logprobs=num_logprobs)
            assert error.field == "num_logprobs"
        assert (await neighbour).token_ids == reference(PROMPT, 300)
        await cluster.nothing_is_left()


@pytest.mark.case("B-099")
async def test_a_tiny_top_p_and_one_kept_token_are_greedy_and_keeping_all_is_off(run, reference):
    async with run("shm") as cluster:
        greedy = reference(PROMPT, 12)
        for narrow in ({"top_p": 1e-9}, {"top_k": 1}):
            drawn = await cluster.ask(PROMPT, max_tokens=12, temperature=1.0, seed=3, **narrow)
            assert drawn.token_ids == greedy
        free = await cluster.ask(PROMPT, max_tokens=12, temperature=1.0, seed=3)
        assert free.token_ids != greedy
        for wide in ({"top_p": 1.0}, {"top_k": 0}, {"top_k": VOCAB_SIZE}, {"top_k": 10**9}):
            drawn = await cluster.ask(PROMPT, max_tokens=12, temperature=1.0, seed=3, **wide)
            assert drawn.token_ids == free.token_ids
        for top_p in (0.0, 1.0001):
            assert (await refused(cluster.client, PROMPT, top_p=top_p)).field == "top_p"
        await cluster.nothing_is_left()


@pytest.mark.case("B-100")
async def test_stop_strings_are_neither_empty_nor_too_many_nor_too_long(run):
    async with run("shm") as cluster:
        for stop in (("",), ("", "x"), ("x",) * 1000, ("x" * 10_000,)):
            assert (await refused(cluster.client, PROMPT, stop=stop)).field.startswith("stop")
        answer = await cluster.ask(PROMPT, max_tokens=8, stop=("\t \t",))
        assert len(answer.token_ids) == 8
        await cluster.nothing_is_left()


@pytest.mark.case("B-101")
async def test_odd_but_valid_text_is_served_whole(run):
    texts = ("\0", "\ufffe", "e" + "\u0301" * 900, "\u05e9\u05dc\u05d5\u05dd \u202e x", "x\ny")
    async with run("shm") as cluster:
        for text in texts:
            for prompt in (text, "x " * 500 + text):
                token_ids = await cluster.client.tokenize(prompt)
                assert await cluster.client.detokenize(token_ids) == prompt
            answer = await cluster.ask(text, max_tokens=2)
            assert len(answer.token_ids) == 2
        await cluster.nothing_is_left()


@pytest.mark.case("B-101")
async def test_text_that_is_no_unicode_is_an_invalid_argument(run):
    surrogate = (
        pb.GenerateRequest(prompt="abc").SerializeToString().replace(b"abc", b"\xed\xa0\x80")
    )
    async with run("shm") as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in channel.unary_stream("/twophase.v1.Inference/Generate")(surrogate):
                pass
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Error" not in refusal.value.details()
