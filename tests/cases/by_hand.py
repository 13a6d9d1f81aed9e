"""A router played by the test: it says to the workers what it likes, when and to whom it likes.

For scenarios that the real router prevents by its own queue and placement, and the workers have to
survive all the same.
"""

import asyncio
import contextlib
from collections import defaultdict
from contextlib import asynccontextmanager

from core.clock import MonotonicClock
from core.request import Request, RequestId, SamplingParams
from core.worker import CancelRequest, FirstToken, NewToken, RequestFailed, Reserve, Reserved
from tests.cases.one_process import SOON_S
from twophase.peer import Peer

LIMIT_S = 60.0


class RouterByHand:
    """One session with decode-0, and prefill calls to whichever worker."""

    def __init__(self, cluster):
        self._clock = MonotonicClock()
        self._peers = {n: Peer(address, self._clock) for n, address in cluster.workers.items()}
        self._session = self._peers["decode-0"].session()
        self._requests = {}
        self._events = defaultdict(list)
        self._heard = asyncio.Condition()

    def reserve(self, name, prompt, *, max_tokens=4):
        """Ask decode for blocks; the request as it will be sent to prefill, too."""
        request = Request(
            RequestId(name),
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens),
            self._clock.now_s() + LIMIT_S,
        )
        self._requests[name] = request
        self._session.send(Reserve(request, prefill_locally=False))
        return request

    def cancel(self, name):
        """Tell decode that the client left."""
        self._session.send(CancelRequest(RequestId(name)))

    async def heard(self, name, kind):
        """The first event of that kind that decode has told of the request."""
        async with asyncio.timeout(SOON_S), self._heard:
            while not (found := [e for e in self._events[name] if isinstance(e, kind)]):
                await self._heard.wait()
        return found[0]

    async def reservation(self, name):
        """What decode set aside for the request."""
        return (await self.heard(name, Reserved)).reservation

    async def prefill(self, name, worker="prefill-0", request=None):
        """Have a prefill worker read the prompt that decode reserved for, or another one."""
        reservation = await self.reservation(name)
        call = self._peers[worker].prefill(request or self._requests[name], reservation)
        async with contextlib.aclosing(call) as events:
            return [event async for event in events]

    async def serve(self, name, worker="prefill-0"):
        """Both phases; the tokens of the answer."""
        first, _ = await self.prefill(name, worker)
        assert isinstance(first, FirstToken)
        num_others = self._requests[name].sampling.max_tokens - 1
        async with asyncio.timeout(SOON_S), self._heard:
            while len(self._tokens(name)) < num_others:
                await self._heard.wait()
        return [first.token_id, *self._tokens(name)]

    def _tokens(self, name):
        return [event.token_id for event in self._events[name] if isinstance(event, NewToken)]

    async def listen(self):
        """Note what decode says; ends with the session."""
        async for update in self._session:
            async with self._heard:
                for event in update.events:
                    assert isinstance(event, Reserved | NewToken | RequestFailed)
                    self._events[event.request_id].append(event)
                self._heard.notify_all()

    async def close(self):
        """End the session, which gives up everything, and the connections."""
        self._session.close()
        for peer in self._peers.values():
            await peer.close()


@asynccontextmanager
async def router_by_hand(cluster):
    """A second router of a running cluster."""
    router = RouterByHand(cluster)
    listening = asyncio.create_task(router.listen())
    try:
        yield router
        assert not listening.done()
    finally:
        listening.cancel()
        await router.close()
        await asyncio.wait([listening])
