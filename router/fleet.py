"""Who is in the cluster: connections to workers, their sessions and what each was given.

One task per known address: connect, hold the session (decode) or the heartbeat (prefill) until
the worker is lost, tell every request that waits for it, and try again. A worker that returns
has a new incarnation; nothing of the old one is believed.

Runs in the router's event loop. Knows nothing of tokens or text.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from core.clock import Clock
from core.errors import DeadlineExceeded, PeerLost, TwophaseError
from core.request import Request, RequestId, WorkerName
from core.worker import (
    BlockHolder,
    CancelRequest,
    DecodeCommand,
    DecodeUpdate,
    NewToken,
    RequestFailed,
    Reserved,
    Role,
    WorkerInfo,
    WorkerStatus,
)
from router.answer import Event
from router.placement import DecodeLoad, PrefillLoad
from twophase.peer import Duplex, Peer, lost

CONNECT_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
RECONNECT_S = 0.5


class Mailbox:
    """All that workers say about one request, in order of arrival."""

    def __init__(self, clock: Clock) -> None:
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
    """One connected worker of a known incarnation."""

    def __init__(self, info: WorkerInfo, peer: Peer) -> None:
        self.info = info
        self.peer = peer
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.last_heard_s = 0.0
        # A call could not reach it; the next heartbeat tells. It gets no request meanwhile, or
        # failing fast would make it look like the least loaded.
        self.is_suspect = False

    @contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """Count `request` as this worker's load while the context lasts."""
        self.num_requests += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_prompt_tokens -= request.num_prompt_tokens


class DecodeMember(Member):
    """A decode worker and this router's session with it."""

    def __init__(self, info: WorkerInfo, peer: Peer) -> None:
        super().__init__(info, peer)
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

        The cancel is harmless when the worker knows the request no more.
        """
        self._mailboxes[request_id] = mailbox
        try:
            yield
        finally:
            del self._mailboxes[request_id]
            self.send(CancelRequest(request_id))

    async def read(self, clock: Clock) -> None:
        """Hand out updates until the session ends; raises PeerLost when it breaks."""
        async for update in self._session:
            self.last_heard_s = clock.now_s()
            events: tuple[Reserved | NewToken | RequestFailed, ...]
            events = (*update.reserved, *update.tokens, *update.failed)
            for event in events:
                mailbox = self._mailboxes.get(event.request_id)
                if mailbox is not None:
                    mailbox.put(event)

    def close(self, error: PeerLost) -> None:
        """End the session and fail everybody who waits for it."""
        self._session.close()
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(RequestFailed(request_id, error))


class Fleet:
    """All known workers; use as an async context manager."""

    def __init__(self, clock: Clock, *, worker_timeout_s: float) -> None:
        self.changed = asyncio.Event()
        self._clock = clock
        self._worker_timeout_s = worker_timeout_s
        self._members: dict[WorkerName, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last_errors: dict[str, TwophaseError] = {}
        self._group = asyncio.TaskGroup()
        self._log = logging.getLogger("twophase.fleet")

    async def __aenter__(self) -> "Fleet":
        """The fleet, with nobody in it."""
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Drop all connections."""
        for task in self._tasks.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def add(self, address: str) -> bool:
        """Keep a connection to the worker at `address` from now on; False if it was known."""
        if address in self._tasks:
            return False
        self._tasks[address] = self._group.create_task(self._keep(address))
        return True

    async def remove(self, address: str) -> None:
        """Forget the worker at `address`; idempotent."""
        task = self._tasks.pop(address, None)
        self._last_errors.pop(address, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def wait_for(self, address: str, timeout_s: float) -> WorkerInfo:
        """What the worker at `address` is, once it is connected.

        Raises:
            PeerLost: it was not connected within `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for member in self._members.values():
                        if member.peer.address == address:
                            return member.info
                    changed = self.changed
                    await changed.wait()
        except TimeoutError as error:
            cause = self._last_errors.get(address)
            detail = f": {cause}" if cause is not None else ""
            raise PeerLost(address, f"not connected within {timeout_s:g} s{detail}") from error

    def members(self, role: Role) -> list[Member]:
        """Connected workers of one pool."""
        return [member for member in self._members.values() if member.info.role is role]

    def prefill(self, name: WorkerName) -> Member:
        """The connected prefill worker of that name.

        Raises:
            PeerLost: it is not connected any more.
        """
        if name not in self._members:
            raise PeerLost(name, "it disconnected after it was placed")
        return self._members[name]

    def decode(self, name: WorkerName) -> DecodeMember:
        """The connected decode worker of that name.

        Raises:
            PeerLost: it is not connected any more.
        """
        member = self._members.get(name)
        if not isinstance(member, DecodeMember):
            raise PeerLost(name, "it disconnected after it was placed")
        return member

    @property
    def num_mailboxes(self) -> int:
        """Requests that wait for what a decode worker says."""
        return sum(
            member.num_mailboxes
            for member in self._members.values()
            if isinstance(member, DecodeMember)
        )

    def prefill_loads(self) -> list[PrefillLoad]:
        """Facts for placement about the prefill pool."""
        return [
            PrefillLoad(
                member.info.name,
                member.info.incarnation,
                member.info.layout,
                member.num_prompt_tokens,
            )
            for member in self.members(Role.PREFILL)
            if not member.is_suspect
        ]

    def decode_loads(self) -> list[DecodeLoad]:
        """Facts for placement about the decode pool."""
        return [
            DecodeLoad(
                member.info.name,
                member.info.incarnation,
                member.info.layout,
                member.num_requests,
                member.info.max_num_sequences,
            )
            for member in self.members(Role.DECODE)
        ]

    async def statuses(self, timeout_s: float) -> tuple[list[WorkerStatus], list[WorkerName]]:
        """What each connected worker holds, and who did not answer."""
        members = list(self._members.values())
        calls = [member.peer.status(timeout_s) for member in members]
        results = await asyncio.gather(*calls, return_exceptions=True)
        statuses = [result for result in results if isinstance(result, WorkerStatus)]
        pairs = zip(members, results, strict=True)
        return statuses, [m.info.name for m, r in pairs if not isinstance(r, WorkerStatus)]

    async def holders(self, timeout_s: float) -> list[BlockHolder]:
        """Who holds blocks on each connected worker; `statuses` tells who does not answer."""
        calls = [member.peer.blocks(timeout_s) for member in self._members.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [holder for result in results if isinstance(result, list) for holder in result]

    async def _keep(self, address: str) -> None:
        while True:
            peer = Peer(address, self._clock)
            try:
                info = await peer.info(CONNECT_TIMEOUT_S)
                await self._serve(info, peer)
            except TwophaseError as error:
                self._last_errors[address] = error
                self._log.info("worker at %s: %s", address, error)
            finally:
                await peer.close()
            await asyncio.sleep(RECONNECT_S)

    async def _serve(self, info: WorkerInfo, peer: Peer) -> None:
        if info.name in self._members:
            other = self._members[info.name].peer.address
            raise PeerLost(peer.address, f"its name {info.name} is that of the worker at {other}")
        for other_member in self._members.values():
            if other_member.info.layout.weights_hash != info.layout.weights_hash:
                raise PeerLost(info.name, f"its weights are not those of {other_member.info.name}")
        member = DecodeMember(info, peer) if info.role is Role.DECODE else Member(info, peer)
        self._members[info.name] = member
        self.announce()
        self._log.info("%s connected at %s", info.name, peer.address)
        error: TwophaseError | None = None
        try:
            await _until_lost(member, self._worker_timeout_s, self._clock)
        except TwophaseError as caught:
            error = caught
            raise
        finally:
            del self._members[info.name]
            if isinstance(member, DecodeMember):
                member.close(lost(info.name, error))
            self.announce()
            self._log.warning("%s disconnected: %s", info.name, error or "stream ended")

    def announce(self) -> None:
        """Wake everybody who waits for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()


async def _until_lost(member: Member, timeout_s: float, clock: Clock) -> None:
    """Return when the worker ends its session; raise PeerLost when it is silent or gone."""
    errors: list[TwophaseError] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(_heartbeat(member, timeout_s, clock))
            if isinstance(member, DecodeMember):
                await member.read(clock)
                heartbeat.cancel()
    except* TwophaseError as group:
        errors.extend(e for e in group.exceptions if isinstance(e, TwophaseError))
    if errors:
        raise errors[0]


async def _heartbeat(member: Member, timeout_s: float, clock: Clock) -> None:
    """Raise when the worker has said nothing at all for `timeout_s`; tokens are a sign of life."""
    while True:
        asked_s = clock.now_s()
        try:
            await member.peer.status(timeout_s)
            member.is_suspect = False
        except DeadlineExceeded as error:
            if member.last_heard_s < asked_s:
                why = f"it has said nothing for {timeout_s:g} s"
                raise PeerLost(member.info.name, why) from error
        await asyncio.sleep(HEARTBEAT_S)
