"""The handler of a stream ends with its first part, and says only what the caller can act on."""

import asyncio

import grpc
import pytest

from core.errors import InvalidRequest, PeerStopping
from twophase.server import readable, run_stream


class FakeContext:
    def __init__(self):
        self.aborted = None

    async def abort(self, code, details, trailer):
        self.aborted = (code, details)
        raise grpc.aio.AbortError


class Part:
    """A coroutine that waits, and notes that it was cancelled."""

    def __init__(self):
        self.is_cancelled = False

    async def run(self):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


async def fail(error):
    raise error


async def test_the_first_part_that_ends_ends_the_others():
    part, context = Part(), FakeContext()
    await run_stream(context, part.run(), asyncio.sleep(0))
    assert part.is_cancelled
    assert context.aborted is None


async def test_a_caller_that_hung_up_is_no_error():
    part, context = Part(), FakeContext()
    await run_stream(context, part.run(), fail(grpc.aio.UsageError("RPC already finished.")))
    assert part.is_cancelled
    assert context.aborted is None


async def test_an_error_of_ours_is_told_by_its_status():
    part, context = Part(), FakeContext()
    with pytest.raises(grpc.aio.AbortError):
        await run_stream(context, part.run(), fail(PeerStopping("decode-0")))
    assert context.aborted == (grpc.StatusCode.UNAVAILABLE, "decode-0 was lost: it is stopping")
    assert part.is_cancelled


async def test_a_bug_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        await run_stream(FakeContext(), Part().run(), fail(ZeroDivisionError()))


async def test_a_handler_that_is_cancelled_leaves_no_part_behind():
    part = Part()
    handler = asyncio.create_task(run_stream(FakeContext(), part.run()))
    await asyncio.sleep(0)
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    assert part.is_cancelled


async def messages(*values):
    for value in values:
        yield value


async def test_what_can_be_read_is_read_in_order_up_to_what_cannot():
    read = []
    with pytest.raises(InvalidRequest, match="unreadable"):
        async for number in readable(messages("1", "2", "x", "3"), int):
            read.append(number)
    assert read == [1, 2]


async def test_an_error_of_whoever_reads_is_not_taken_for_an_unreadable_message():
    with pytest.raises(ValueError, match="mine"):
        async for _ in readable(messages("1"), int):
            raise ValueError("mine")
