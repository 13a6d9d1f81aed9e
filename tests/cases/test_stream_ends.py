"""How a stream ends: one last message with a reason, or an error status; and how a server stops."""

import asyncio
import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.parity import wait_until_ready
from core.config import load_config
from core.errors import Cancelled, DeadlineExceeded, PeerLost
from core.request import FinishReason
from deploy.local_cluster import local_cluster
from tests.cases.one_process import prompt_of
from twophase.client import AsyncClient, Sampling

PROMPT = prompt_of(20, 118)
SERVING = health_pb2.HealthCheckResponse.SERVING


async def chunks_of(cluster, **sampling):
    sampling.setdefault("ignore_eos", True)
    return [chunk async for chunk in cluster.client.generate(PROMPT, Sampling(**sampling))]


@pytest.mark.case("B-118")
async def test_success_has_exactly_one_last_message_with_a_reason(run, reference):
    async with run("shm") as cluster:
        tokens = reference(PROMPT, 30)
        text = await cluster.client.detokenize(tokens)
        ends = {
            FinishReason.LENGTH: [{"max_tokens": 6}, {"max_tokens": 1}],
            FinishReason.STOP: [
                {"max_tokens": 30, "stop_token_ids": (tokens[4],)},
                {"max_tokens": 30, "stop": (text[4:6],)},
            ],
        }
        for reason, asked in ends.items():
            for sampling in asked:
                *others, last = await chunks_of(cluster, **sampling)
                assert last.completion.finish_reason is reason
                assert all(chunk.completion is None and chunk.token_ids for chunk in others)
                num_tokens = sum(len(chunk.token_ids) for chunk in others)
                assert last.completion.usage.num_output_tokens == num_tokens
        await cluster.nothing_is_left()


@pytest.mark.case("B-115", "B-117")
async def test_no_part_of_a_stop_string_is_sent_wherever_tokens_begin(run, reference):
    async with run("shm") as cluster:
        tokens = reference(PROMPT, 12)
        text = await cluster.client.detokenize(tokens)
        first = await cluster.client.detokenize(tokens[:1])
        at = len(first) - 1
        # From the last character of prefill's token into those of decode.
        stops = [text[at : at + width] for width in (2, 3, 5)] + [text[at : at + 2] + "never"]
        for stop in stops:
            sampling = {"max_tokens": 12, "stop": (stop,)}
            sent = "".join([chunk.text for chunk in await chunks_of(cluster, **sampling)])
            once = await cluster.client.generate_once(PROMPT, Sampling(**sampling, ignore_eos=True))
            assert sent == once.text == text.partition(stop)[0]
        await cluster.nothing_is_left()


@pytest.mark.case("B-118")
@pytest.mark.parametrize("how", ["cancel", "deadline", "decode lost"])
async def test_failure_is_an_error_and_tells_how_far_the_answer_was(run, how):
    async with run("shm") as cluster:
        decode = cluster.devices["decode-0"]
        timeout_s = 1.0 if how == "deadline" else 20.0
        asking = asyncio.create_task(
            cluster.ask(PROMPT, max_tokens=3000, request_id="mine", timeout_s=timeout_s)
        )
        num_steps = decode.num_steps
        async with asyncio.timeout(10):
            while decode.num_steps < num_steps + 5:
                await asyncio.sleep(0.005)
        if how == "cancel":
            await cluster.client.cancel("mine")
        elif how == "decode lost":
            async with AsyncClient(cluster.address) as client:
                await client.remove_worker(cluster.workers["decode-0"])
        answer = await asking
        kinds = {"cancel": Cancelled, "deadline": DeadlineExceeded, "decode lost": PeerLost}
        assert isinstance(answer.error, kinds[how])
        assert answer.completion is None
        assert len(answer.token_ids) >= 4
        if answer.error.completion is not None:  # at a deadline the client may be the first
            known = answer.error.completion
            assert known.usage.num_output_tokens == len(answer.token_ids)
            assert known.phases.time_to_first_token_s > 0
        if how != "decode lost":
            await cluster.nothing_is_left()


@pytest.mark.case("B-082", "B-089")
async def test_a_router_that_stops_ends_running_streams_and_takes_nothing_new(model):
    overrides = ("router.port=0", "router.http_port=null", "decode.kv_cache=4MiB")
    config = load_config(None, [f"model={model}", *overrides, "prefill.kv_cache=4MiB"])
    started = await asyncio.to_thread(_Started, config)
    try:
        await _drain_with_streams(started.cluster)
    finally:
        await asyncio.to_thread(started.stop)


class _Started:
    """A cluster of processes; both its ends are called in threads, so that streams go on."""

    def __init__(self, config):
        self._context = local_cluster(config, tell=lambda line: None)
        self.cluster = self._context.__enter__()

    def stop(self):
        self._context.__exit__(None, None, None)


async def _drain_with_streams(cluster):
    router = cluster.children["router"].process
    async with (
        AsyncClient(cluster.address) as client,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        await wait_until_ready(client)
        sampling = Sampling(max_tokens=400, ignore_eos=True)
        streams = [client.generate([n + 3, 5], sampling) for n in range(10)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="twophase.v1.Inference"))
        while (await watch.read()).status != SERVING:
            pass

        router.send_signal(signal.SIGTERM)
        stopped_s = time.monotonic()
        assert (await watch.read()).status != SERVING
        for stream in streams[:3]:
            await stream.aclose()
        # Readiness goes first: what comes before the port is closed is answered.
        with pytest.raises(PeerLost):
            while time.monotonic() - stopped_s < 5.0:
                async with AsyncClient(cluster.address) as late:
                    await late.generate_once(PROMPT, Sampling(max_tokens=2), timeout_s=5.0)
        ends = await asyncio.gather(*(_last(stream) for stream in streams[3:]))
        assert [end.completion.usage.num_output_tokens for end in ends] == [400] * 7
        # The health's watcher is still there: it holds up nobody.
        assert await asyncio.to_thread(router.wait, 15.0) == 0
    assert time.monotonic() - stopped_s < 21.0


async def _last(stream):
    last = None
    async for chunk in stream:
        last = chunk
    return last
