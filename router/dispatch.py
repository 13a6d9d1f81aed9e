"""The life of a request, in one function.

`Dispatcher.run` waits for workers (`placing`), has decode reserve blocks, has prefill compute and
ship the KV cache, and hands each token to `deliver` exactly once and in order, until the answer is
complete. When a worker fails the request, `recovery` says whether another attempt is made; it goes
on from the last emitted token. The KV cache for that may come from a decode worker that stops, as
from a prefill worker. Whatever happens, leaving an attempt gives back what it held: the decode
worker is told to cancel (harmless after the end), unless it keeps the KV cache for the next
attempt, the prefill call is cancelled, the mailbox is gone.

Runs in the router's event loop. Knows token ids, no text; knows workers, no sockets.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace

from core.clock import Clock
from core.completion import Completion
from core.errors import (
    DeadlineExceeded,
    PeerLost,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.request import OutputToken, Request
from core.settings.router import OnFailure
from core.signals import Demand
from core.timeline import TransferReport
from core.worker import (
    CancelRequest,
    Held,
    RemoteReservation,
    RequestFailed,
    Reserve,
    Reserved,
)
from router.answer import Answer, Event, PrefillFailed
from router.members.fleet import Fleet
from router.members.member import DecodeMember, Mailbox
from router.placing.knowledge import Lease
from router.placing.line import Placing
from router.placing.placement import Placement
from router.placing.recovery import Failure, Origin, Recovery
from router.policy import DispatchPolicy
from router.telemetry.totals import KvCounters

# So long a worker's own word for a failure is waited for, once the other one passed it on.
CAUSE_S = 0.5

Deliver = Callable[[list[OutputToken]], Awaitable[int | None]]


class Dispatcher:
    """Runs requests on a fleet; use as an async context manager."""

    def __init__(
        self, fleet: Fleet, policy: DispatchPolicy, counters: KvCounters, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._counters = counters
        self._clock = clock
        self._placing = Placing(fleet, policy, clock)
        self._prefills = asyncio.TaskGroup()
        self._num_prefill_calls = 0
        self._watch: asyncio.Task[None] | None = None
        self._log = logging.getLogger("twophase.router")

    async def __aenter__(self) -> "Dispatcher":
        """The dispatcher, with nothing to do."""
        await self._prefills.__aenter__()
        self._watch = self._prefills.create_task(self._placing.watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Wait for prefill calls that are being cancelled."""
        assert self._watch is not None
        self._watch.cancel()
        await self._prefills.__aexit__(None, None, None)

    def obey(self, policy: DispatchPolicy) -> None:
        """Place and recover by this policy from now on; an attempt keeps what it began with."""
        self._policy = policy
        self._placing.obey(policy)

    @property
    def num_prefill_calls(self) -> int:
        """Calls to prefill workers that have not ended."""
        return self._num_prefill_calls

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for workers with room."""
        return self._placing.num_waiting

    @property
    def demand(self) -> Demand:
        """What this router is asked for."""
        return self._placing.demand

    async def run(
        self,
        answer: Answer,
        *,
        deliver: Deliver,
        placement: Placement | None = None,
    ) -> Completion:
        """Have workers make `answer`; returns how it ended.

        Args:
            answer: of a validated request, whose deadline bounds every wait here; nobody has begun
                it. It tells at any time how far it is.
            deliver: is given new tokens, in order, each exactly once; returns when they were
                handed to the transport. A number means that the answer ends here, with so many
                of them; None that it goes on.
            placement: where to serve it, in one attempt (a probe); None leaves both to the policy.

        Raises:
            PeerLost: there is no worker, or the last one that was tried died.
            DeadlineExceeded, Overloaded, TransferFailed, InvalidRequest: as their names say.
        """
        request = answer.request
        on_failure = self._policy.on_failure if placement is None else OnFailure.FAIL
        recovery = Recovery(on_failure, self._policy.max_attempts)
        try:
            timeout_s = request.deadline_s - self._clock.now_s()
            async with asyncio.timeout(timeout_s), AsyncExitStack() as held:
                while not answer.is_complete:
                    async with self._placing.placed(answer, recovery, placement) as lease:
                        failure = await self._attempt(answer, deliver, lease)
                        await held.aclose()  # what it fetched, if it did
                        if failure is not None:
                            held.callback(self._let_go, failure.origin)
                            self._fleet.blame(lease.placement, failure)
                            self._note(answer, failure, lease, is_probe=placement is not None)
                            recovery.failed(failure, lease.placement)
        except TimeoutError as error:
            detail = f"request {request.request_id} was not done within its deadline"
            raise DeadlineExceeded(detail) from error
        return answer.completion(self._clock.now_s(), tuple(recovery.failures))

    async def _attempt(self, answer: Answer, deliver: Deliver, lease: Lease) -> Failure | None:
        """Serve what is missing of `answer` on these workers; None when it is complete."""
        placement = lease.placement
        request = answer.attempt(placement, self._clock.now_s())
        try:
            decode = self._fleet.decode(placement.decode)
        except PeerLost as error:
            answer.fail(error, self._clock.now_s())
            return Failure(error, is_from_prefill=False)
        mailbox = Mailbox(self._clock, request.num_prompt_tokens)
        with decode.serving(request), decode.receiving(request.request_id, mailbox):
            decode.send(Reserve(request, prefill_locally=placement.prefill is None))
            async with self._prefilling(request, placement, mailbox) as start_prefill:
                while not answer.is_complete:
                    heard = await mailbox.get()
                    for event, arrived_s in heard:
                        failure = answer.take(event, arrived_s)
                        self._placing.knowledge.hear(lease, event, arrived_s)
                        if failure is not None:
                            break
                        if isinstance(event, Reserved):
                            start_prefill(event.reservation)
                    tokens = answer.take_undelivered()
                    if tokens:
                        num_last = await deliver(tokens)
                        answer.delivered(self._clock.now_s())
                        if num_last is not None:
                            answer.stop(len(tokens) - num_last)
                    if failure is not None and not answer.is_complete:
                        failure = await _root_cause(failure, heard, mailbox)
                        answer.fail(failure.error, self._clock.now_s())
                        return replace(failure, origin=_try_keep(decode, mailbox, event))
        return None

    def _let_go(self, origin: Origin | None) -> None:
        """Nobody fetches that KV cache any more; it may have been fetched."""
        if origin is not None:
            with suppress(PeerLost):
                self._fleet.decode(origin.decode).send(CancelRequest(origin.held_id))

    def _note(self, answer: Answer, failure: Failure, lease: Lease, *, is_probe: bool) -> None:
        """Count it, and after a failed handoff have the next probe tell whether any can succeed."""
        if is_probe:
            return  # its own failure must not call for the next probe at once
        name, placement = answer.request.log_name, lease.placement
        if failure.origin is not None:
            self._log.info("request %s leaves %s", name, failure.origin.decode)
            return
        if placement.held_id is not None and lease.work and not lease.work.is_shipped:
            self._counters.migration_failed(failure.error)
        self._log.warning("request %s: an attempt failed: %s", name, failure.error)
        self._counters.attempt_failed(placement, failure.error)
        if isinstance(failure.error, TransferFailed):
            self._fleet.announce()

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
        try:
            worker = self._fleet.prefill(placement.prefill)
            if placement.held_id is None:
                asked = worker.peer.prefill(request, reservation)
            else:
                asked = worker.peer.migrate(placement.held_id, request, reservation)
            with worker.serving(request):
                async with aclosing(asked) as events:
                    async for event in events:
                        mailbox.put(event)
                        if isinstance(event, TransferReport) and placement.held_id is not None:
                            self._counters.migrated(event.num_bytes)
            worker.breaker.succeeded()
        except TwophaseError as error:
            mailbox.put(PrefillFailed(error))
        finally:
            self._num_prefill_calls -= 1


async def _root_cause(
    failure: Failure, heard: Sequence[tuple[Event, float]], mailbox: Mailbox
) -> Failure:
    """What the worker says that gave the request up, where the other one was heard first.

    Both tell, each in its own way, and who only saw the handoff aborted does not know why.
    """
    if not _is_echo(failure.error):
        return failure
    unheard: set[type[Event]] = {PrefillFailed, RequestFailed}
    with suppress(TimeoutError):
        async with asyncio.timeout(CAUSE_S):
            while unheard:
                for event, _ in heard:
                    if isinstance(event, PrefillFailed | RequestFailed):
                        if not _is_echo(event.error):
                            return Failure(event.error, isinstance(event, PrefillFailed))
                        unheard.discard(type(event))
                heard = await mailbox.get() if unheard else ()
    return failure


def _is_echo(error: TwophaseError) -> bool:
    return isinstance(error, TransferFailed) and error.reason is TransferFailure.ABORTED


def _try_keep(decode: DecodeMember, mailbox: Mailbox, last: Event) -> Origin | None:
    """Where the next attempt may fetch the KV cache, if `last` says that it is held there."""
    if not isinstance(last, Held):
        return None
    mailbox.is_held = True
    info = decode.info
    return Origin(info.name, info.incarnation, info.layout, last.request_id)
