"""Links into a decode worker, over the in-process backend: who is let in, and how a link ends."""

import asyncio
import dataclasses
import gc
import threading

import pytest
import torch

from core.clock import ManualClock
from core.config import TransferConfig
from core.errors import ConfigError, LayoutMismatch, PeerLost, TransferFailed, TransferFailure
from core.layout import Dtype
from core.link import Begin, LinkOpened, LinkRefused, OpenLink, PieceAck
from core.worker import RequestFailed
from decode_worker import link as decode_link
from decode_worker.link import LinkServer
from kv_transfer.backend import BackendKind, Endpoint, Offer
from kv_transfer.inbound import FENCE_TIMEOUT_S
from kv_transfer.shm import host_id
from tests.unit.decode_worker.driver import LAYOUT, World, assert_nothing_is_left, make_request

OPEN = OpenLink("prefill-0", "p1", "1", LAYOUT, "auto", host_id(), "cpu", False, False)


class SlowBackend:
    """A backend whose `take` returns when the test lets it, with the right checksum or an error."""

    def __init__(self):
        self.may_return = threading.Event()
        self.is_taking = threading.Event()
        self.error = None
        self.is_closed = False
        self.checksum = 7

    def offer(self, link_id, cache_L2NSKD):
        return Offer("shm", {"link_id": link_id}), self

    def accept(self, timeout_s):
        pass

    def take(self, span, target_block_ids):
        self.is_taking.set()
        assert self.may_return.wait(10.0)
        if self.error is not None:
            raise self.error
        return self.checksum

    def is_writer_gone(self):
        return self.is_closed

    def close(self):
        self.is_closed = True


class LinkWorld(World):
    def __init__(self, **transfer):
        super().__init__()
        self.backend = SlowBackend()
        shape = (LAYOUT.num_layers, 2, 16, LAYOUT.block_size, 1, LAYOUT.head_dim)
        self.server = LinkServer(
            self.worker.info,
            self.worker,
            torch.zeros(shape, dtype=torch.bfloat16),
            {BackendKind.SHM: self.backend},
            config=TransferConfig(**transfer),
            clock=ManualClock(),
        )
        self.incoming = asyncio.Queue()
        self.said = []

    async def messages(self):
        while (message := await self.incoming.get()) is not None:
            yield message

    def open(self, opening=OPEN):
        self.incoming.put_nowait(opening)
        return asyncio.create_task(self.server.serve(self.messages(), self.said.append))

    async def taking(self):
        """A link whose thread has the first piece in hand; its task."""
        self.reserve()
        task = self.open()
        self.incoming.put_nowait(Begin("r", self.epoch()))
        self.incoming.put_nowait(self.pieces()[0])
        assert await asyncio.to_thread(self.backend.is_taking.wait, 10.0)
        return task


@pytest.mark.case("B-025", "B-027", "B-032")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"decode_incarnation": "0"}, PeerLost),
        ({"layout": dataclasses.replace(LAYOUT, num_layers=9)}, LayoutMismatch),
        ({"layout": dataclasses.replace(LAYOUT, dtype=Dtype.FLOAT32)}, LayoutMismatch),
        ({"backend": "torch"}, ConfigError),
    ],
)
async def test_a_link_that_cannot_be_is_refused_with_the_reason(change, kind):
    world = LinkWorld()
    await world.open(dataclasses.replace(OPEN, **change))
    (refused,) = world.said
    assert isinstance(refused, LinkRefused)
    assert isinstance(refused.error, kind)
    assert world.server.statuses == ()


ON_CARD = dataclasses.replace(OPEN, device="cuda:1", card="b", reachable_cards=("a", "b"))


class OnCard:
    """A cache of which only the device is looked at."""

    device = torch.device("cuda", 0)


@pytest.fixture
def card_world(monkeypatch):
    """A decode worker whose cache lies on card a."""
    here = Endpoint(host_id(), "cuda:0", card="a", reachable_cards=("a",))
    monkeypatch.setattr(decode_link, "local_endpoint", lambda cache: here)
    world = LinkWorld()
    world.server._cache_L2NSKD = OnCard()
    return world


async def test_a_link_between_ranks_on_cards_is_refused_with_both_sizes(card_world):
    layout = dataclasses.replace(LAYOUT, tensor_parallel_size=2)
    await card_world.open(dataclasses.replace(ON_CARD, layout=layout))
    (refused,) = card_world.said
    assert isinstance(refused.error, ConfigError)
    assert "ipc on cards reaches only rank 0's cache; there are 2 ranks at prefill-0" in str(
        refused.error
    )


async def test_a_link_from_a_cpu_into_a_card_is_refused(card_world):
    await card_world.open()
    (refused,) = card_world.said
    assert "one cache lies on cpu, the other on cuda:0" in str(refused.error)


@pytest.mark.parametrize("change", [{"block_size": 8}, {"tensor_parallel_size": 2}])
async def test_a_link_from_another_shape_is_opened_and_told_ours(change):
    world = LinkWorld()
    layout = dataclasses.replace(LAYOUT, **change)
    task = world.open(dataclasses.replace(OPEN, layout=layout))
    world.incoming.put_nowait(None)
    await task
    (opened,) = world.said
    assert isinstance(opened, LinkOpened)
    assert (opened.layout, opened.num_blocks) == (LAYOUT, 16)


@pytest.mark.parametrize("first", [None, PieceAck("r", 1, 0)])
async def test_a_stream_that_opens_no_link_is_refused(first):
    world = LinkWorld()
    await world.open(first)
    assert [type(message) for message in world.said] == [LinkRefused]
    assert world.server.statuses == ()


async def test_a_stream_that_stays_silent_is_refused_in_time():
    world = LinkWorld(connect_timeout_s=0.01)
    await world.server.serve(world.messages(), world.said.append)
    assert [type(message) for message in world.said] == [LinkRefused]


async def test_a_link_is_known_from_its_opening_to_the_end_of_its_stream():
    world = LinkWorld()
    world.backend.may_return.set()
    task = await world.taking()
    (status,) = world.server.statuses
    assert (status.peer, status.backend) == ("prefill-0", "shm")
    assert status.reason == "both caches lie in the memory of one host"
    world.incoming.put_nowait(None)
    await task
    assert isinstance(world.said[0], LinkOpened)
    assert world.said[-1] == PieceAck("r", world.epoch(), 0)
    assert world.server.num_bytes == world.pieces()[0].num_bytes
    assert world.server.statuses == ()
    assert world.backend.is_closed
    assert_nothing_is_left(world)


async def test_a_take_that_fails_ends_the_link_and_its_handoffs(caplog):
    world = LinkWorld()
    world.backend.error = PeerLost("prefill-0", "killed")
    task = await world.taking()
    world.backend.may_return.set()
    await task
    error = world.error()
    assert isinstance(error, TransferFailed)
    assert "killed" in error.detail
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert_nothing_is_left(world)


@pytest.mark.case("B-001")
async def test_a_link_that_leaves_an_abort_unanswered_is_dropped_and_its_stream_ends_in_order():
    world = LinkWorld()
    world.backend.may_return.set()
    task = await world.taking()
    world.cancel()
    world.pass_s(FENCE_TIMEOUT_S)
    world.pass_s(0.25)
    # not as cancelled: of that gRPC would tell the prefill worker nothing
    await task
    assert world.server.statuses == ()
    assert_nothing_is_left(world)


@pytest.mark.parametrize("order", [("a", "b"), ("a", "right", "b")], ids="-".join)
async def test_a_link_whose_bytes_and_headers_are_out_of_step_is_closed(order):
    world = LinkWorld()
    world.backend.may_return.set()
    for number, name in enumerate(order):
        world.reserve(make_request(name, first=50 * number))
    task = world.open()
    for name in order:
        world.incoming.put_nowait(Begin(name, world.epoch(name)))
        first, second = world.pieces(name)
        # what comes off the link has the checksum of a first piece
        wrong = dataclasses.replace(first, checksum=second.checksum)
        world.incoming.put_nowait(first if name == "right" else wrong)
    if "right" in order:
        # 1 a spoilt piece now and then costs its own handoff only
        while world.server.num_bytes < 3 * first.num_bytes:
            await asyncio.sleep(0)
        assert len(world.server.statuses) == 1
        world.incoming.put_nowait(None)
    # 2 two in a row end the link, though its stream goes on
    await asyncio.wait_for(task, 10.0)
    failed = {e.request_id: e.error.reason for e in world.events() if isinstance(e, RequestFailed)}
    assert {"a": failed["a"], "b": failed["b"]} == dict.fromkeys("ab", TransferFailure.CHECKSUM)
    assert failed.get("right", TransferFailure.LINK_LOST) is TransferFailure.LINK_LOST
    assert world.server.statuses == ()
    assert_nothing_is_left(world)


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_link_that_is_cancelled_keeps_its_blocks_until_its_thread_has_returned(num_cancels):
    world = LinkWorld()
    task = await world.taking()
    world.cancel()
    for _ in range(num_cancels):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    assert world.pool.counts().quarantined == 2
    world.backend.may_return.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_is_left(world)
