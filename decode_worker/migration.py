"""Ships the KV cache of a running answer to another decode worker, when this one stops.

1 the answer is held: no token comes, all that were made were told     `worker.hold`
2 the router reserves at the other worker, for prompt and answer so far as one prompt
3 here the answer's next token is made; meanwhile the whole blocks are pushed, as a prefill worker
  pushes those of a prompt, then the rest, and the token goes out with the seal
4 whether that went well or not, the answer ends here, and its blocks go back once the handoff is
  closed                                                               `worker.shipped`

So to the other worker this one is a prefill worker like any. Runs in the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from core.clock import Clock
from core.errors import TwophaseError
from core.request import Request, RequestId
from core.timeline import PrefillReport
from core.worker import (
    DecodeUpdate,
    FirstToken,
    NewToken,
    PrefillEvent,
    RemoteReservation,
    RequestFailed,
)
from decode_worker.worker import DecodeWorker
from kv_link.link import Handoff
from kv_link.link_pool import LinkPool


@dataclass(frozen=True, slots=True)
class Departure:
    """An answer that is to leave: what it is called here, what there, and where it goes."""

    held_id: RequestId
    request: Request
    reservation: RemoteReservation


class Migrations:
    """Answers on their way to other decode workers."""

    def __init__(self, worker: DecodeWorker, links: LinkPool, clock: Clock) -> None:
        self.links = links
        self.changed: Callable[[], None] = lambda: None
        self._worker = worker
        self._clock = clock
        self._log = logging.getLogger("twophase.decode_worker")

    async def ship(
        self, session_id: str, outbox: asyncio.Queue[DecodeUpdate], departure: Departure
    ) -> AsyncGenerator[PrefillEvent, None]:
        """The answer's next token, and the report once every byte is proven at the other worker.

        `outbox` is told what the worker tells the session, which is this handoff's own.

        Raises:
            TransferFailed, LayoutMismatch, ConfigError, PeerLost: it cannot be, or did not arrive.
        """
        request, reservation = departure.request, departure.reservation
        block_ids = self._worker.ship(session_id, departure.held_id, request)
        self.changed()
        try:
            asked_s = self._clock.now_s()
            handoff = await self.links.begin(request, reservation)
            queue_s = self._clock.now_s() - asked_s
            async with aclosing(self._push(handoff, request, block_ids, outbox, queue_s)) as events:
                async for event in events:
                    yield event
        finally:
            self._worker.shipped(session_id, self._clock.now_s())
            self.changed()
        self._log.info(
            "request %s: %d tokens of KV went to %s",
            departure.held_id,
            request.num_prompt_tokens,
            reservation.decode_worker,
        )

    async def _push(
        self,
        handoff: Handoff,
        request: Request,
        block_ids: tuple[int, ...],
        outbox: asyncio.Queue[DecodeUpdate],
        queue_s: float,
    ) -> AsyncGenerator[PrefillEvent, None]:
        num_tokens, began_s = request.num_prompt_tokens, self._clock.now_s()

        def tell(error: TwophaseError) -> None:
            outbox.put_nowait(DecodeUpdate(failed=(RequestFailed(request.request_id, error),)))

        try:
            handoff.on_failure(tell)
            handoff.computed(num_tokens - 1, block_ids)
            token = await _next_token(outbox)
            handoff.computed(num_tokens, block_ids, token.token_id)
            prefill_s = self._clock.now_s() - began_s
            # Nothing was read: the one step made the next token, as any step of decode does.
            report = PrefillReport(queue_s, prefill_s, num_tokens - 1, num_chunks=1)
            yield FirstToken(token.token_id, report, token.logprobs)
            yield await handoff.sealed()
        finally:
            await handoff.close()


async def _next_token(outbox: asyncio.Queue[DecodeUpdate]) -> NewToken:
    """The token that the session is told; raises what it is told instead."""
    while True:
        update = await outbox.get()
        for failed in update.failed:
            raise failed.error
        for token in update.tokens:
            return token
