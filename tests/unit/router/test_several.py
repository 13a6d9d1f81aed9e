"""Several answers over one transport: who starts when, one delivery at a time, one end for all."""

import asyncio

import pytest

from core.completion import Chunk
from core.errors import PeerLost
from core.worker import NewToken
from router.answer import Answer
from router.placing.holder import beside
from router.placing.load import DecodeLoad, Need
from router.placing.placement import Placement, Reason, Rejected
from router.several import Delivery, make_answers
from tests.unit.router.doubles import LAYOUT, make_info, make_request, reserved, until


def delivery(index):
    return Delivery(make_request(), (Chunk("x", (index,), index=index),))


class Transport:
    """Takes one delivery at a time; holds it while `is_open` is not set."""

    def __init__(self):
        self.taken = []
        self.num_inside = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def deliver(self, given):
        self.num_inside += 1
        assert self.num_inside == 1
        await self.is_open.wait()
        self.num_inside -= 1
        self.taken.append(given.chunks[0].index)


@pytest.fixture
def transport():
    return Transport()


async def test_the_others_start_when_the_prompt_is_read_and_all_are_told_by_index(transport):
    read, started = asyncio.Event(), []

    async def make(index, deliver):
        started.append(index)
        await deliver(delivery(index))
        if index == 0:
            assert started == [0]
            read.set()
            await asyncio.sleep(0)
        await deliver(delivery(index))
        return f"completion {index}"

    ended = await make_answers(3, make, transport.deliver, read)
    assert ended == ("completion 0", "completion 1", "completion 2")
    assert started == [0, 1, 2]
    assert sorted(transport.taken) == [0, 0, 1, 1, 2, 2]


async def test_the_others_start_at_the_end_of_the_first_if_decode_had_nothing_of_it(transport):
    async def make(index, deliver):
        await deliver(delivery(index))
        return index

    assert await make_answers(3, make, transport.deliver, asyncio.Event()) == (0, 1, 2)
    assert transport.taken[0] == 0


async def test_each_answer_waits_for_the_transport_so_at_most_one_delivery_of_each_is_held(
    transport,
):
    transport.is_open.clear()
    read, delivered = asyncio.Event(), [0, 0, 0]
    read.set()

    async def make(index, deliver):
        for _ in range(5):
            await deliver(delivery(index))
            delivered[index] += 1
        return index

    asking = asyncio.create_task(make_answers(3, make, transport.deliver, read))
    await until(lambda: transport.num_inside == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert delivered == [0, 0, 0]
    transport.is_open.set()
    assert await asking == (0, 1, 2)
    assert delivered == [5, 5, 5]


@pytest.mark.parametrize("failing", [0, 1, "transport"])
async def test_the_first_error_ends_all_and_is_raised_as_it_is(transport, failing):
    read, ended = asyncio.Event(), []

    async def make(index, deliver):
        try:
            read.set()
            await deliver(delivery(index))
            if index == failing:
                raise PeerLost("decode-0", "killed")
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    async def broken(given):
        raise PeerLost("decode-0", "killed")

    deliver = broken if failing == "transport" else transport.deliver
    with pytest.raises(PeerLost, match="killed"):
        await make_answers(3, make, deliver, read)
    assert sorted(ended) == [0, 1, 2]


async def test_a_cancel_ends_all(transport):
    started, ended = [], []

    async def make(index, deliver):
        started.append(index)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    read = asyncio.Event()
    read.set()
    asking = asyncio.create_task(make_answers(2, make, transport.deliver, read))
    await until(lambda: len(started) == 2)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and sorted(ended) == [0, 1]


class TestWhereTheOthersGo:
    NEED = Need(num_prompt_tokens=10, num_tokens=14)

    def load(self, *, num_sequences=1, num_cached_tokens=8):
        load = DecodeLoad.of(make_info("decode-0"), num_sequences)
        fields = {name: getattr(load, name) for name in DecodeLoad.__slots__}
        return DecodeLoad(**fields | {"num_cached_tokens": num_cached_tokens})

    def test_beside_the_first_which_has_all_full_blocks(self):
        placement = beside("1", self.NEED, [self.load()])
        assert isinstance(placement, Placement)
        assert (placement.prefill, placement.decode, placement.is_fallback) == (
            None,
            "decode-0",
            False,
        )

    def test_they_wait_while_it_is_full(self):
        rejected = beside("1", self.NEED, [self.load(num_sequences=8)])
        assert isinstance(rejected, Rejected) and rejected.reason is Reason.FULL

    def test_like_any_other_request_where_it_is_gone_or_has_them_no_more(self):
        assert beside("2", self.NEED, [self.load()]) is None
        assert beside("", self.NEED, [self.load()]) is None
        assert 10 - 4 > LAYOUT.block_size
        assert beside("1", self.NEED, [self.load(num_cached_tokens=4)]) is None

    def test_the_holder_is_who_has_decoded_last(self):
        answer = Answer(make_request(max_tokens=9), 0.0, 0.0)
        for attempt, worker in enumerate(("a", "b")):
            answer.attempt(Placement("p", "d", "", "p1", worker), 1.0)
            answer.take(reserved(), 1.0)
            assert answer.prompt_holder == ("" if attempt == 0 else "a")
            answer.take(NewToken("r", 7, 1), 2.0)
            assert answer.prompt_holder == worker
            answer.fail(PeerLost(worker, "gone"), 3.0)
