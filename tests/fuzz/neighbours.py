"""Four ordinary streams beside whatever a test does: their tokens must be what they always are."""

import asyncio
import threading
from contextlib import contextmanager

from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

NUM_STREAMS = 4
SAMPLING = Sampling(max_tokens=60, ignore_eos=True, temperature=0.8, seed=11)
JOIN_TIMEOUT_S = 30.0


async def _answer(client, number):
    prompt = [3 + number, 7, 11, 200 + number]
    chunks = client.generate(prompt, SAMPLING, timeout_s=30.0)
    return [token_id async for chunk in chunks for token_id in chunk.token_ids]


class Neighbours:
    """Streams in a thread of their own; `rounds` counts the answers that were as expected."""

    def __init__(self, address):
        self.rounds = [0] * NUM_STREAMS
        self.error = None
        self._address = address
        self._is_over = threading.Event()
        self._is_warm = threading.Event()

    def run(self):
        try:
            asyncio.run(self._run())
        except BaseException as error:  # told by the test's own thread
            self.error = error
        finally:
            self._is_warm.set()

    async def _run(self):
        async with AsyncClient(self._address) as client:
            expected = [await _answer(client, number) for number in range(NUM_STREAMS)]
            self._is_warm.set()
            await asyncio.gather(
                *(self._repeat(client, number, tokens) for number, tokens in enumerate(expected))
            )

    async def _repeat(self, client, number, expected):
        while not self._is_over.is_set():
            assert await _answer(client, number) == expected
            self.rounds[number] += 1

    def wait_until_warm(self):
        assert self._is_warm.wait(JOIN_TIMEOUT_S)

    def stop(self):
        self._is_over.set()


@contextmanager
def undisturbed_neighbours(address):
    """Streams run while the context lasts; none of their tokens changes, and nothing is left."""
    neighbours = Neighbours(address)
    thread = threading.Thread(target=neighbours.run)
    thread.start()
    try:
        neighbours.wait_until_warm()
        yield
    finally:
        neighbours.stop()
        thread.join(JOIN_TIMEOUT_S)
    if neighbours.error is not None:
        raise neighbours.error
    assert min(neighbours.rounds) > 0
    asyncio.run(assert_nothing_left(address))
