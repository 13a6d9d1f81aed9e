"""One connected worker, as the router sees it: what it was given, what it says, how it does.

Runs in the router's event loop. Knows nothing of tokens or text, and decides nothing: `fleet` does.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.clock import Clock
from core.errors import PeerLost, PeerStopping
from core.listing import WorkerState
from core.request import Request, RequestId
from core.worker import (
    CancelRequest,
    DecodeCommand,
    DecodeUpdate,
    HoldRequest,
    NewToken,
    RequestFailed,
    WorkerInfo,
    WorkerStatus,
)
from router.answer import Event
from router.members.breaker import Breaker
from router.members.progress import StepWatch
from router.placing.load import DecodeLoad, PrefillLoad
from twophase.peer import Duplex, Peer

# To read fewer again takes no longer than to fetch them.
MIN_MIGRATED_TOKENS = 64


class Mailbox:
    """All that workers say about one request, in order of arrival.

    num_tokens: of its prompt, and those that its decode worker made; has_token: it made some.
    is_leaving: that worker stops. is_held: its KV cache stays there after the mailbox is gone.
    """

    def __init__(self, clock: Clock, num_prompt_tokens: int = 0) -> None:
        self.num_tokens = num_prompt_tokens
        self.has_token = False
        self.is_leaving = False
        self.is_held = False
        self._clock = clock
        self._queue: asyncio.Queue[tuple[Event, float]] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Deliver `event` now."""
        self._queue.put_nowait((event, self._clock.now_s()))

    async def get(self) -> list[tuple[Event, float]]:
        """Events since the last call and when each arrived; waits for at least one."""
        deliveries = [await self._queue.get()]
        while not self._queue.empty():
            deliveries.append(self._queue.get_nowait())
        return deliveries


class Member:
    """One connected worker of a known incarnation.

    idle_load: what placement is told of it, with nothing to do; made once, read for each request.
    is_draining: it stops, and is given nothing new. status is what it said last; None before.
    cold_until_s: until when others go first, unless its links are tested before.
    """

    def __init__(self, info: WorkerInfo, peer: Peer) -> None:
        self.info = info
        self.idle_load = PrefillLoad.of(info, 0)
        self.peer = peer
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.last_heard_s = 0.0
        self.is_draining = False
        self.cold_until_s = -math.inf
        self.status: WorkerStatus | None = None
        self.breaker = Breaker()
        self.steps = StepWatch()

    def is_usable(self, now_s: float) -> bool:
        """Whether it may be given a request now."""
        return not self.is_draining and self.breaker.allows(now_s)

    def is_cold(self, now_s: float) -> bool:
        """Whether its links are not tested yet."""
        return now_s < self.cold_until_s

    def state(self, now_s: float) -> WorkerState:
        """Whether it is given requests, in one word."""
        if self.is_draining:
            return WorkerState.DRAINING
        if self.is_cold(now_s):
            return WorkerState.WARMING
        return WorkerState.READY if self.is_usable(now_s) else WorkerState.SUSPECT

    @contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """Count `request` as this worker's load while the context lasts."""
        self.num_requests += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        try:
            with self.breaker.attempt():
                yield
        finally:
            self.num_requests -= 1
            self.num_prompt_tokens -= request.num_prompt_tokens


class DecodeMember(Member):
    """A decode worker and this router's session with it."""

    def __init__(self, info: WorkerInfo, peer: Peer) -> None:
        super().__init__(info, peer)
        self.idle_decode_load = DecodeLoad.of(info, 0)
        self._session: Duplex[DecodeCommand, DecodeUpdate] = peer.session()
        self._mailboxes: dict[RequestId, Mailbox] = {}

    @property
    def num_mailboxes(self) -> int:
        """Requests that wait for this worker."""
        return len(self._mailboxes)

    def send(self, command: DecodeCommand) -> None:
        """Queue a command."""
        self._session.send(command)

    @contextmanager
    def receiving(self, request_id: RequestId, mailbox: Mailbox) -> Iterator[None]:
        """Put what the worker says about the request into `mailbox`; cancel it at the end.

        The cancel is harmless when the worker knows the request no more. One that is held is not
        cancelled: whoever set `is_held` does that.
        """
        self._mailboxes[request_id] = mailbox
        try:
            yield
        finally:
            del self._mailboxes[request_id]
            if not mailbox.is_held:
                self.send(CancelRequest(request_id))

    async def read(self, clock: Clock, on_draining: Callable[[], None]) -> None:
        """Hand out updates until the session ends; raises PeerLost when it breaks."""
        async for update in self._session:
            self.last_heard_s = clock.now_s()
            for event in update.events:
                mailbox = self._mailboxes.get(event.request_id)
                if mailbox is not None:
                    self._hand_out(event, mailbox)
            if update.is_draining:
                on_draining()

    def _hand_out(self, event: Event, mailbox: Mailbox) -> None:
        if isinstance(event, NewToken):
            mailbox.num_tokens += 1
            if not mailbox.has_token:
                mailbox.has_token = True
                self.breaker.succeeded()
        mailbox.put(event)

    def hand_over(self, *, may_migrate: bool) -> None:
        """Have every request that waits for this worker go on elsewhere; it is stopping.

        Answers of some length are held first, so that their KV caches can be fetched. Idempotent.
        """
        for request_id, mailbox in self._mailboxes.items():
            if mailbox.is_leaving:
                continue
            mailbox.is_leaving = True
            is_long = mailbox.num_tokens >= MIN_MIGRATED_TOKENS
            if may_migrate and mailbox.has_token and is_long:
                self.send(HoldRequest(request_id))
            else:
                mailbox.put(RequestFailed(request_id, PeerStopping(self.info.name)))

    def close(self, error: PeerLost) -> None:
        """End the session and fail everybody who waits for it."""
        self._session.close()
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(RequestFailed(request_id, error))
