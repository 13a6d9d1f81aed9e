"""The gRPC endpoint: sizes, slow readers, broken replies, ids in use."""

import asyncio
import re
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import router.service
from core.errors import DuplicateRequest, InvalidRequest, TwophaseError
from tests.cases.one_process import prompt_of
from twophase.client import Sampling
from twophase.client.messages import generate_request
from twophase.v1 import inference_pb2_grpc

MIB = 1 << 20
PROMPT = prompt_of(20, 80)


@pytest.mark.case("B-080")
async def test_a_message_above_the_limit_is_refused_with_both_sizes(run, reference):
    async with run("shm") as cluster:
        for num_bytes, field in ((int(3.9 * MIB), "prompt"), (int(4.1 * MIB), "message")):
            with pytest.raises(InvalidRequest) as refusal:
                await cluster.client.generate_once("x" * num_bytes)
            assert refusal.value.field == field
        assert re.search(rf"larger than max \(4\d+ vs. {4 * MIB}\)", str(refusal.value))
        with pytest.raises(InvalidRequest, match="larger than max"):
            await cluster.client.tokenize("x" * (20 * MIB))
        answer = await cluster.ask(PROMPT, max_tokens=200, num_logprobs=20)
        assert answer.token_ids == reference(PROMPT, 200)
        await cluster.nothing_is_left()


@pytest.mark.case("B-080")
async def test_the_limit_can_be_set(run):
    async with run("shm", "router.max_message=8KiB") as cluster:
        with pytest.raises(InvalidRequest, match="vs. 8192"):
            await cluster.client.tokenize("x" * 9000)
        assert await cluster.client.tokenize("x" * 3000)


@pytest.mark.case("B-085")
async def test_slow_readers_hold_up_nobody_and_are_bounded_by_their_own_limit(run, reference):
    async with run("shm") as cluster:
        slow = [
            cluster.client.generate(PROMPT, Sampling(max_tokens=150, ignore_eos=True))
            for _ in range(20)
        ]
        firsts = await asyncio.gather(*(anext(stream) for stream in slow))
        assert all(first.token_ids for first in firsts)
        answers = await asyncio.gather(*(cluster.ask(PROMPT, max_tokens=40) for _ in range(5)))
        assert all(answer.token_ids == reference(PROMPT, 40) for answer in answers)
        # What nobody reads waits as ids, and the whole answer is still there for who goes on.
        rest = [token_id async for chunk in slow[0] for token_id in chunk.token_ids]
        assert [*firsts[0].token_ids, *rest] == reference(PROMPT, 150)
        for stream in slow:
            await stream.aclose()
        await cluster.nothing_is_left()


@pytest.mark.case("B-085")
async def test_a_stream_that_nobody_reads_pauses_and_keeps_its_tokens(run, reference, monkeypatch):
    written = []
    to_wire = router.service.chunk_to_wire

    def counted(chunk):
        written.extend(chunk.token_ids)
        return to_wire(chunk)

    monkeypatch.setattr(router.service, "chunk_to_wire", counted)
    message = generate_request(
        PROMPT, Sampling(max_tokens=500, num_logprobs=20, ignore_eos=True), "", ""
    )
    # The window of a client that never lets it grow.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10))
    async with (
        run("shm") as cluster,
        grpc.aio.insecure_channel(cluster.address, options=options) as channel,
    ):
        answer = inference_pb2_grpc.InferenceStub(channel).Generate(message)
        stream = aiter(answer)
        token_ids = [*(await anext(stream)).token_ids]
        await cluster.until_count("decode-0", "num_handler_tasks", lambda count: count == 0)
        # Decode has made the whole answer; the transport took what its window holds, no more.
        num_written = len(written)
        assert num_written < 450
        assert (await cluster.ask(PROMPT, max_tokens=40)).token_ids == reference(PROMPT, 40)
        assert len(written) == num_written + 40
        async for response in stream:
            token_ids += response.token_ids
        assert token_ids == reference(PROMPT, 500)
        # What it never takes is ended by its deadline.
        started_s = time.monotonic()
        late = inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=1.0)
        await late.read()
        await cluster.nothing_is_left()
        assert time.monotonic() - started_s < 5


@pytest.mark.case("B-087")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_reply_that_cannot_be_built_is_told_at_once_and_logged(
    run, monkeypatch, caplog, is_stream
):
    async with run("shm") as cluster:
        monkeypatch.setattr(router.service, "chunk_to_wire", lambda chunk: 17)
        started_s = time.monotonic()
        with pytest.raises(TwophaseError) as failure:
            sampling = Sampling(max_tokens=5)
            if is_stream:
                await anext(cluster.client.generate(PROMPT, sampling, request_id="broken"))
            else:
                await cluster.client.generate_once(PROMPT, sampling, request_id="broken")
        assert time.monotonic() - started_s < 5
        assert str(failure.value) == "the server failed to serve this call"
        assert "broken" in caplog.text and "Traceback" in caplog.text
        monkeypatch.undo()
        await cluster.nothing_is_left()


@pytest.mark.case("B-088", "B-112")
async def test_stray_bytes_and_certain_tokens_never_break_a_reply(run):
    async with run("shm") as cluster:
        answers = await asyncio.gather(
            *(
                cluster.client.generate_once(
                    PROMPT,
                    Sampling(
                        max_tokens=8,
                        ignore_eos=True,
                        seed=seed,
                        num_logprobs=5,
                        temperature=2.0 if seed % 2 else 0.01,
                        top_k=0 if seed % 2 else 1,
                    ),
                )
                for seed in range(100)
            )
        )
        for answer in answers:
            answer.text.encode()  # no surrogates
            assert len(answer.logprobs) == 8
            values = [
                v for each in answer.logprobs for v in (each.chosen, *dict(each.top).values())
            ]
            assert all(-1e9 < value <= 0 for value in values)
        assert any("\ufffd" in answer.text for answer in answers)
        await cluster.nothing_is_left()


@pytest.mark.case("B-104")
async def test_an_id_may_be_used_again_once_its_request_has_ended(run, reference):
    async with run("shm") as cluster:
        stream = cluster.client.generate(
            PROMPT, Sampling(max_tokens=60, ignore_eos=True), request_id="twin"
        )
        first = await anext(stream)
        for _ in range(2):
            answer = await cluster.ask([1, 2], max_tokens=2, request_id="twin")
            assert isinstance(answer.error, DuplicateRequest)
        rest = [token_id async for chunk in stream for token_id in chunk.token_ids]
        assert [*first.token_ids, *rest] == reference(PROMPT, 60)
        for _ in range(20):  # at once, also while prefill may not have let go of it
            again = await cluster.ask(PROMPT, max_tokens=3, request_id="twin")
            assert again.token_ids == reference(PROMPT, 3)
        await cluster.nothing_is_left()


@pytest.mark.case("B-105")
async def test_a_huge_text_starves_neither_health_nor_streams(run, reference):
    async with run("shm") as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        streams = [
            asyncio.create_task(cluster.ask(prompt_of(9, n), max_tokens=150)) for n in range(5)
        ]
        huge = [
            asyncio.create_task(cluster.ask("word " * (num_bytes // 5), max_tokens=2))
            for num_bytes in (20 * MIB, int(3.9 * MIB), int(3.9 * MIB))
        ]
        slowest_s = 0.0
        while not all(task.done() for task in (*streams, *huge)):
            asked_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            await asyncio.sleep(0.02)
        assert slowest_s < 1.5
        assert all(isinstance(task.result().error, InvalidRequest) for task in huge)
        for n, task in enumerate(streams):
            assert task.result().token_ids == reference(prompt_of(9, n), 150)
        await cluster.nothing_is_left()
