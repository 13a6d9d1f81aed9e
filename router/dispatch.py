"""The life of a request, in one function.

`Dispatcher.run` places a request, has decode reserve blocks, has prefill compute and ship the KV
cache, and hands each token to `deliver` exactly once and in order, until the answer is complete.
Whatever happens, leaving the function gives back what the request held: the decode worker is told
to cancel (harmless after the end), the prefill call is cancelled, the mailbox is gone.

Runs in the router's event loop. Knows token ids, no text; knows workers, no sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from core.clock import Clock
from core.completion import Completion
from core.config import Mode
from core.errors import DeadlineExceeded, PeerLost, TwophaseError
from core.request import Request
from core.worker import RemoteReservation, RequestFailed, Reserve, Reserved
from router.answer import Answer
from router.fleet import Fleet, Mailbox, Member
from router.placement import Placement, Rejected, place

Deliver = Callable[[list[int]], Awaitable[None]]


class Dispatcher:
    """Runs requests on a fleet; use as an async context manager."""

    def __init__(
        self, fleet: Fleet, mode: Mode, clock: Clock, *, may_convert_dtype: bool = False
    ) -> None:
        self._fleet = fleet
        self._mode = mode
        self._may_convert_dtype = may_convert_dtype
        self._clock = clock
        self._prefills = asyncio.TaskGroup()
        self._num_prefill_calls = 0

    async def __aenter__(self) -> "Dispatcher":
        """The dispatcher, with nothing to do."""
        await self._prefills.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Wait for prefill calls that are being cancelled."""
        await self._prefills.__aexit__(None, None, None)

    @property
    def num_prefill_calls(self) -> int:
        """Calls to prefill workers that have not ended."""
        return self._num_prefill_calls

    async def run(
        self,
        request: Request,
        *,
        received_s: float,
        tokenize_s: float,
        deliver: Deliver,
        placement: Placement | None = None,
    ) -> Completion:
        """Serve `request`; returns how it ended.

        Args:
            request: validated; its deadline bounds every wait here.
            received_s: when it came, by this dispatcher's clock.
            tokenize_s: what its tokenization took.
            deliver: is given new token ids, in order, each exactly once; returns when they were
                handed to the transport.
            placement: where to serve it; None leaves the choice to `place`.

        Raises:
            PeerLost: there is no worker, or one died.
            DeadlineExceeded, Overloaded, TransferFailed, InvalidRequest: as their names say.
        """
        answer = Answer(request, received_s, tokenize_s)
        try:
            async with asyncio.timeout(request.deadline_s - self._clock.now_s()):
                await self._run(request, answer, deliver, placement or self._place())
        except TimeoutError as error:
            detail = f"request {request.request_id} was not done within its deadline"
            raise DeadlineExceeded(detail) from error
        return answer.completion(self._clock.now_s())

    async def _run(
        self, request: Request, answer: Answer, deliver: Deliver, placement: Placement
    ) -> None:
        answer.placed(placement, self._clock.now_s())
        decode = self._fleet.decode(placement.decode)
        mailbox = Mailbox(self._clock)
        with decode.serving(request), decode.receiving(request.request_id, mailbox):
            decode.send(Reserve(request, prefill_locally=placement.prefill is None))
            async with self._prefilling(request, placement, mailbox) as start_prefill:
                while not answer.is_complete:
                    for event, arrived_s in await mailbox.get():
                        answer.take(event, arrived_s)
                        if isinstance(event, Reserved):
                            start_prefill(event.reservation)
                    token_ids = answer.take_undelivered()
                    if token_ids:
                        await deliver(token_ids)
                        answer.delivered(self._clock.now_s())

    def _place(self) -> Placement:
        placement = place(
            self._mode,
            self._fleet.prefill_loads(),
            self._fleet.decode_loads(),
            may_convert_dtype=self._may_convert_dtype,
        )
        if isinstance(placement, Rejected):
            raise PeerLost("cluster", placement.why)
        return placement

    @asynccontextmanager
    async def _prefilling(
        self, request: Request, placement: Placement, mailbox: Mailbox
    ) -> AsyncIterator[Callable[[RemoteReservation], None]]:
        """Yield what starts the prefill; a call that still runs at the end is cancelled."""
        calls: list[asyncio.Task[None]] = []

        def start(reservation: RemoteReservation) -> None:
            if placement.prefill is not None:
                call = self._prefill(placement, request, reservation, mailbox)
                calls.append(self._prefills.create_task(call))

        try:
            yield start
        finally:
            for call in calls:
                call.cancel()

    async def _prefill(
        self,
        placement: Placement,
        request: Request,
        reservation: RemoteReservation,
        mailbox: Mailbox,
    ) -> None:
        assert placement.prefill is not None
        self._num_prefill_calls += 1
        worker: Member | None = None
        try:
            worker = self._fleet.prefill(placement.prefill)
            with worker.serving(request):
                async with aclosing(worker.peer.prefill(request, reservation)) as events:
                    async for event in events:
                        mailbox.put(event)
        except TwophaseError as error:
            if worker is not None and isinstance(error, PeerLost):
                worker.is_suspect = error.peer == worker.peer.address
            mailbox.put(RequestFailed(request.request_id, error))
        finally:
            self._num_prefill_calls -= 1
