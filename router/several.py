"""n answers to one prompt, side by side, over one transport.

1 answer 0 goes the way of every request    3 the others start where its KV cache now is
2 decode has the prompt's KV cache          4 deliveries of all go out one at a time

Workers know nothing of it: each answer is a request of its own to them. If one answer fails, the
others are cancelled, and the request fails with its error. Runs in the router's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from core.completion import Chunk, Completion
from core.request import Request


@dataclass(frozen=True, slots=True)
class Delivery:
    """Chunks of one answer that are due at the same time.

    One for each new token, or the closing one alone.
    """

    request: Request
    chunks: tuple[Chunk, ...]


Deliver = Callable[[Delivery], Awaitable[None]]
# Makes the answer of this index, and tells its deliveries.
Make = Callable[[int, Deliver], Awaitable[Completion]]
Outbox = asyncio.Queue[tuple[Delivery, asyncio.Future[None]]]


async def make_answers(
    num_answers: int, make: Make, deliver: Deliver, prompt_read: asyncio.Event
) -> tuple[Completion, ...]:
    """How each answer ended, by index.

    Args:
        num_answers: at least 1.
        make: called once for each index; raises to fail the request.
        deliver: given one delivery at a time, those of each answer in order.
        prompt_read: set, once answer 0 has made it easy, to let the others start.
    """
    if num_answers == 1:
        return (await make(0, deliver),)
    # Holds at most one delivery of each answer, which waits until it was written.
    outbox: Outbox = asyncio.Queue()

    async def deliver_in_turn(delivery: Delivery) -> None:
        written = asyncio.get_running_loop().create_future()
        outbox.put_nowait((delivery, written))
        await written

    async def make_first() -> Completion:
        completion = await make(0, deliver_in_turn)
        prompt_read.set()
        return completion

    async def make_other(index: int) -> Completion:
        await prompt_read.wait()
        return await make(index, deliver_in_turn)

    others = [make_other(index) for index in range(1, num_answers)]
    return await _all_of([make_first(), *others], beside=_write(outbox, deliver))


async def _all_of(
    works: list[Coroutine[Any, Any, Completion]], *, beside: Coroutine[Any, Any, None]
) -> tuple[Completion, ...]:
    """What all of `works` return, `beside` running meanwhile; the first error ends everything."""
    try:
        async with asyncio.TaskGroup() as tasks:
            helping = tasks.create_task(beside)
            running = [tasks.create_task(work) for work in works]
            done = [await task for task in running]
            helping.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return tuple(done)


async def _write(outbox: Outbox, deliver: Deliver) -> None:
    while True:
        delivery, written = await outbox.get()
        await deliver(delivery)
        if not written.done():  # its answer may have been cancelled meanwhile
            written.set_result(None)
