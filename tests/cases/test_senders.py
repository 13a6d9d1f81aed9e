"""On whose behalf a request comes, over gRPC: its session's worker, its turn, its refusal."""

import asyncio

import grpc
import pytest

from core.errors import InvalidRequest
from tests.cases.one_process import prompt_of
from twophase.client import Priority, Sampling, Sender
from twophase.errors import from_rpc_error
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc

NO_END = {"ignore_eos": True}
SETUP = ("decode.replicas=2", "decode.max_num_sequences=1")


async def ask(cluster, number, *, max_tokens=3, **sender):
    answer = await cluster.client.generate_once(
        prompt_of(20, number), Sampling(max_tokens=max_tokens, **NO_END), sender=Sender(**sender)
    )
    return answer.completion


async def test_a_session_stays_where_it_was_and_high_goes_before_low(run):
    async with run("shm", *SETUP) as cluster:
        # 1 while its worker is busy a session goes elsewhere, and stays there from then on
        first = await ask(cluster, 0, session="chat")
        other = next(name for name in cluster.workers if "decode" in name)
        assert first.decode_worker == other
        busy = asyncio.create_task(ask(cluster, 1, max_tokens=900))
        await cluster.until_count(other, "num_running_requests", lambda count: count == 1)
        async with asyncio.timeout(20):
            moved = await ask(cluster, 2, session="chat")
            stayed = [await ask(cluster, number, session="chat") for number in range(3, 6)]
        for completion in stayed:
            assert completion.decode_worker == moved.decode_worker
            assert "served this session" in completion.placement
        await busy
        # 2 all places are taken (two requests a slot): a low one waits, higher ones pass it
        decode = [device for name, device in cluster.devices.items() if "decode" in name]
        with decode[0].held(), decode[1].held():
            fill = [asyncio.create_task(ask(cluster, 10 + number)) for number in range(4)]
            await until_placed(cluster, 4, 4)
            waiting = {}
            for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
                asked = ask(cluster, 20 + priority, priority=priority)
                waiting[priority] = asyncio.create_task(asked)
                await until_placed(cluster, 4, 4 + len(waiting))
        await asyncio.gather(*fill)
        waits = {priority: (await asked).phases.place_s for priority, asked in waiting.items()}
        assert waits[Priority.HIGH] < waits[Priority.NORMAL] < waits[Priority.LOW]
        # 3 what is no session, user or priority is refused by name
        for name, sender in (("session", {"session": "x" * 129}), ("user", {"client": "x" * 129})):
            with pytest.raises(InvalidRequest, match="at most 128") as refused:
                await ask(cluster, 0, **sender)
            assert refused.value.field == name
        message = pb.GenerateRequest(prompt="x", priority=9)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            with pytest.raises(grpc.RpcError) as failed:
                async for _ in pb_grpc.InferenceStub(channel).Generate(message):
                    pass
        error = from_rpc_error(failed.value, "router")
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.value) == ("priority", "9")
        await cluster.nothing_is_left()


async def until_placed(cluster, num_placed, num_inside):
    """Return once so many requests are inside, of which so many have workers."""
    async with asyncio.timeout(10):
        while True:
            requests = await cluster.client.admin.requests()
            placed = [request for request in requests if request.decode_worker]
            if (len(placed), len(requests)) == (num_placed, num_inside):
                return
            await asyncio.sleep(0.005)
