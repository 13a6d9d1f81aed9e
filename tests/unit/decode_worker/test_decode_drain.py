"""A decode worker that stops, and streams that break: every router is told, nothing is left."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc
import pytest

from core.clock import MonotonicClock
from core.errors import PeerStopping
from core.tally import Tally
from core.worker import NewToken, RequestFailed, Reserve, Reserved
from decode_worker.migration import Migrations
from decode_worker.service import DecodeService
from tests.unit.decode_worker.driver import World, assert_nothing_is_left, make_request
from twophase.credentials import Access
from twophase.peer import Peer
from twophase.server import running_server
from twophase.v1 import worker_pb2_grpc as pb_grpc

SESSION = "/twophase.v1.DecodeWorker/Session"
LINK = "/twophase.v1.DecodeWorker/Link"
LATE_S = 10.0


class TestHandingBack:
    def test_takes_nothing_new_and_says_why(self):
        world = World()
        world.worker.is_draining = True
        (failed,) = world.reserve()
        assert isinstance(failed, RequestFailed)
        assert (type(failed.error), failed.error.peer) == (PeerStopping, "decode-0")
        assert_nothing_is_left(world)

    def test_in_every_phase_a_request_is_given_back_and_its_blocks_are_free(self):
        world = World(num_blocks=7, budget=4)
        link = world.link()
        world.reserve(make_request("runs", 4))
        link.hand_over("runs")
        world.reserve(make_request("receives", 4, first=50))
        link.begin("receives")
        world.reserve(make_request("reads", 9, first=90), is_local=True)
        world.reserve(make_request("waits", 9, first=120))
        steps = world.start_step()
        world.worker.hand_back(world.now_s)
        failed = {event.request_id: event.error for event in world.events()}
        assert {id_: type(error) for id_, error in failed.items()} == dict.fromkeys(
            ("runs", "receives", "reads", "waits"), PeerStopping
        )
        world.end_step(steps)
        link.acknowledge(world.reservations["receives"].epoch, "receives")
        assert_nothing_is_left(world)


class TestRunnable:
    def test_is_what_waits_for_the_device_alone(self):
        world = World(num_blocks=4, budget=4)
        link = world.link()
        assert world.worker.census.num_runnable == 0
        world.reserve(make_request("a", 4))
        assert world.worker.census.num_runnable == 0  # it waits for its KV cache
        link.hand_over("a")
        assert world.worker.census.num_runnable == 1
        world.reserve(make_request("b", 9, first=90), is_local=True)
        assert world.worker.census.num_runnable == 1  # b waits for blocks

    def test_counts_a_step_that_nobody_waits_for_any_more(self):
        world = World()
        world.reserve(make_request("a"), is_local=True)
        steps = world.start_step()
        world.cancel("a")
        assert world.worker.census.num_runnable == 1
        world.end_step(steps)
        assert world.worker.census.num_runnable == 0


class SilentLinks:
    """Links that carry nothing: each reads its stream to the end."""

    num_bytes = 0
    statuses = ()
    num_open = 0

    async def serve(self, messages, say):
        self.num_open += 1
        try:
            async for _ in messages:
                pass
        finally:
            self.num_open -= 1


class NoLinks:
    """Nothing is sent to other workers."""

    num_open_transfers = 0
    statuses = ()
    tally = Tally()


class Served:
    """A DecodeService behind gRPC on loopback; the device is the test."""

    def __init__(self):
        self.world = World()
        self.links = SilentLinks()
        self.clock = MonotonicClock()
        self.service = DecodeService(
            self.world.worker, None, self.links,
            Migrations(self.world.worker, NoLinks(), self.clock), device=None, clock=self.clock,
        )  # fmt: skip

    @asynccontextmanager
    async def listening(self):
        async with running_server("127.0.0.1:0", Access(), stop_grace_s=1.0) as server:
            pb_grpc.add_DecodeWorkerServicer_to_server(self.service, server.grpc)
            pb_grpc.add_WorkerServicer_to_server(self.service, server.grpc)
            self.address = await server.start()
            peer = Peer(self.address, self.clock)
            try:
                yield peer
            finally:
                await peer.close()

    def step(self):
        self.world.step()
        self.service.changed()

    async def until(self, fact):
        async with asyncio.timeout(LATE_S):
            while not fact():
                await asyncio.sleep(0.01)


@pytest.fixture
def served():
    return Served()


async def reserved_locally(session, updates, request_id="r"):
    """Have the worker read a prompt itself; returns once it has blocks."""
    request = make_request(request_id, deadline_s=MonotonicClock().now_s() + 100.0)
    session.send(Reserve(request, prefill_locally=True))
    update = await anext(updates)
    assert [type(event) for event in update.reserved] == [Reserved]


class TestDraining:
    async def test_tells_routers_lets_streams_end_and_then_ends_the_session(self, served):
        async with asyncio.timeout(LATE_S), served.listening() as peer:
            session = peer.session()
            updates = aiter(session)
            await reserved_locally(session, updates)
            draining = asyncio.create_task(served.service.drain(LATE_S))
            assert (await anext(updates)).is_draining
            assert (await peer.status(1.0)).is_draining
            session.send(Reserve(make_request("late", deadline_s=1e9), prefill_locally=True))
            (refused,) = (await anext(updates)).failed
            assert isinstance(refused.error, PeerStopping)
            assert not draining.done()
            for _ in range(3):
                served.step()
            tokens = [token async for update in updates for token in update.tokens]
            assert [type(token) for token in tokens] == [NewToken] * 3
            await draining
        assert_nothing_is_left(served.world)

    async def test_hands_back_what_is_not_done_in_time(self, served):
        async with asyncio.timeout(LATE_S), served.listening() as peer:
            session = peer.session()
            updates = aiter(session)
            await reserved_locally(session, updates)
            await served.service.drain(0.01)
            failed = [failed async for update in updates for failed in update.failed]
            assert [(f.request_id, type(f.error)) for f in failed] == [("r", PeerStopping)]

    async def test_is_at_once_where_nothing_is_to_be_done(self, served):
        async with served.listening():
            async with asyncio.timeout(1.0):
                await served.service.drain(LATE_S)

    async def test_a_router_that_comes_late_is_told_too(self, served):
        async with asyncio.timeout(LATE_S), served.listening() as peer:
            session = peer.session()
            updates = aiter(session)
            await reserved_locally(session, updates)
            draining = asyncio.create_task(served.service.drain(LATE_S))
            assert (await anext(aiter(peer.session()))).is_draining
            for _ in range(3):
                served.step()
            await draining

    async def test_links_end_as_well(self, served):
        async with asyncio.timeout(LATE_S), served.listening() as peer:
            link = peer.link()
            await served.until(lambda: served.links.num_open == 1)
            await served.service.drain(LATE_S)
            assert [message async for message in link] == []
            assert served.links.num_open == 0


class TestBrokenStreams:
    @pytest.mark.parametrize("method", [SESSION, LINK])
    @pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\xff"])
    async def test_bytes_that_are_no_message_are_refused_in_words(
        self, served, caplog, method, message
    ):
        async with asyncio.timeout(LATE_S), served.listening():
            async with grpc.aio.insecure_channel(served.address) as channel:
                call = channel.stream_stream(method)(iter([message]))
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    async for _ in call:
                        pass
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not [record for record in caplog.records if record.exc_info]

    async def test_an_empty_link_message_is_refused_in_words(self, served, caplog):
        async with asyncio.timeout(LATE_S), served.listening():
            async with grpc.aio.insecure_channel(served.address) as channel:
                call = channel.stream_stream(LINK)(iter([b""]))
                with pytest.raises(grpc.aio.AioRpcError, match="without content"):
                    async for _ in call:
                        pass
        assert not [record for record in caplog.records if record.exc_info]

    async def test_a_router_that_hangs_up_is_no_error_and_leaves_nothing(self, served, caplog):
        with caplog.at_level(logging.DEBUG):
            async with asyncio.timeout(LATE_S), served.listening() as peer:
                for number in range(20):
                    other = Peer(served.address, served.clock)
                    session = other.session()
                    await reserved_locally(session, aiter(session), f"r{number}")
                    served.step()
                    await other.close()
                    for _ in range(10):
                        served.step()
                    await served.until(lambda: served.world.worker.census.num_known == 0)
                assert (await peer.status(1.0)).num_handler_tasks == 0
        assert not [record for record in caplog.records if record.exc_info]
        assert_nothing_is_left(served.world)
