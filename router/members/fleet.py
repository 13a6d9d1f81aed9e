"""Who is in the cluster: connections to workers, their sessions and what each was given.

One task per known address: connect, hold the session (decode) and the heartbeat until the worker
is lost, tell every request that waits for it, and try again after a back-off. A worker that
returns has a new incarnation; nothing of the old one is believed. One that says that it is
stopping gets nothing new, and hands over its requests as soon as another one can take them. One
that was given up in silence, or without any progress, is stuck: its process may live, and whoever
started it is told to replace it. One that has just connected is cold: while others can serve, it
is given nothing until `readiness` has tested its links, for `warm_s` at most.

Runs in the router's event loop. Knows nothing of tokens or text.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from core.backoff import Backoff
from core.clock import Clock
from core.errors import DeadlineExceeded, PeerLost, PeerStopping, TwophaseError
from core.request import WorkerName
from core.worker import BlockHolder, Role, StuckWorker, WorkerInfo, WorkerStatus
from router.members.blame import blamed
from router.members.member import DecodeMember, Member
from router.members.stuck import Stuck, StuckWorkers
from router.placing.load import DecodeLoad, PrefillLoad
from router.placing.placement import Placement
from router.placing.recovery import Failure
from twophase.credentials import Credentials
from twophase.peer import Peer, lost

CONNECT_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
RECONNECT_S = 0.5
MAX_RECONNECT_S = 10.0


class Fleet:
    """All known workers; use as an async context manager."""

    def __init__(
        self,
        clock: Clock,
        *,
        worker_timeout_s: float,
        wedged_after_s: float,
        warm_s: float = 0.0,
        may_migrate: bool = True,
        credentials: Credentials = Credentials(),
    ) -> None:
        self.changed = asyncio.Event()
        self._clock = clock
        self._worker_timeout_s = worker_timeout_s
        self._wedged_after_s = wedged_after_s
        self._warm_s = warm_s
        self._may_migrate = may_migrate
        self._credentials = credentials
        self._members: dict[WorkerName, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last_errors: dict[str, str] = {}
        self._stuck = StuckWorkers()
        self._group = asyncio.TaskGroup()
        self._log = logging.getLogger("twophase.fleet")

    async def __aenter__(self) -> "Fleet":
        """The fleet, with nobody in it."""
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Drop all connections."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def add(self, address: str) -> bool:
        """Keep a connection to the worker at `address` from now on; False if it was known."""
        if is_new := address not in self._tasks:
            self._tasks[address] = self._group.create_task(self._keep(address))
        return is_new

    async def remove(self, address: str) -> None:
        """Forget the worker at `address`; idempotent."""
        if (task := self._tasks.pop(address, None)) is not None:
            task.cancel()
            await asyncio.wait([task])
        self._last_errors.pop(address, None)
        self._stuck.forget(address)

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
                    await self.changed.wait()
        except TimeoutError as error:
            detail = f": {self._last_errors[address]}" if address in self._last_errors else ""
            raise PeerLost(address, f"not connected within {timeout_s:g} s{detail}") from error

    @property
    def is_incomplete(self) -> bool:
        """Whether a known worker is not connected, and looked for."""
        return len(self._members) < len(self._tasks)

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
        return sum(member.num_mailboxes for member in self._decode_members())

    @property
    def stuck(self) -> list[StuckWorker]:
        """Workers that were given up although their processes may live."""
        return self._stuck.told(self._clock.now_s())

    @property
    def cold(self) -> list[Member]:
        """Workers whose links are to be tested before they are given requests."""
        now_s = self._clock.now_s()
        members = self._members.values()
        return [member for member in members if member.is_cold(now_s) and not member.is_draining]

    def warmed(self, members: Sequence[Member]) -> None:
        """The links of these workers were tested, or tried for long enough."""
        for member in members:
            member.cold_until_s = -math.inf
        self.announce()

    def prefill_loads(self) -> list[PrefillLoad]:
        """The prefill workers that may be given a request; what they have to do is not told.

        Cold ones are among them only where there is no other.
        """
        now_s = self._clock.now_s()
        usable = [member for member in self.members(Role.PREFILL) if member.is_usable(now_s)]
        warm = [member for member in usable if not member.is_cold(now_s)]
        return [member.idle_load for member in warm or usable]

    def decode_loads(self) -> list[DecodeLoad]:
        """The decode workers that may be given a request; what they have to do is not told.

        Cold ones where there is no other; all, where every one has failed lately: none makes up.
        """
        now_s = self._clock.now_s()
        taking = [member for member in self._decode_members() if not member.is_draining]
        usable = [member for member in taking if member.is_usable(now_s)]
        warm = [member for member in usable if not member.is_cold(now_s)]
        return [member.idle_decode_load for member in warm or usable or taking]

    def blame(self, placement: Placement, failure: Failure) -> None:
        """Count a failed attempt against the workers whose fault it may be."""
        prefill = self._placed(placement.prefill, placement.prefill_incarnation)
        decode = self._placed(placement.decode, placement.decode_incarnation)
        peer = failure.error.peer if isinstance(failure.error, PeerLost) else None
        for member in blamed(failure, prefill, decode):
            is_unreachable = peer == member.peer.address
            member.breaker.failed(self._clock.now_s(), is_unreachable=is_unreachable)
        if isinstance(failure.error, PeerStopping):
            for end in (prefill, decode):
                if end is not None and end.info.name == peer:
                    self._drain(end)

    async def statuses(self, timeout_s: float) -> tuple[list[WorkerStatus], list[WorkerName]]:
        """What each connected worker holds, and who did not answer."""
        members = list(self._members.values())
        calls = [member.peer.status(timeout_s) for member in members]
        results = await asyncio.gather(*calls, return_exceptions=True)
        told = {m.info.name: r for m, r in zip(members, results, strict=True)}
        statuses = [result for result in results if isinstance(result, WorkerStatus)]
        return statuses, [name for name, r in told.items() if not isinstance(r, WorkerStatus)]

    async def holders(self, timeout_s: float) -> list[BlockHolder]:
        """Who holds blocks on each connected worker; `statuses` tells who does not answer."""
        calls = [member.peer.blocks(timeout_s) for member in self._members.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [holder for result in results if isinstance(result, list) for holder in result]

    def drain(self, name: WorkerName) -> Member | None:
        """Give a worker nothing new from now on; None if it is not connected. Idempotent."""
        if (member := self._members.get(name)) is not None:
            self._drain(member)
        return member

    def announce(self) -> None:
        """Wake everybody who waits for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _decode_members(self) -> list[DecodeMember]:
        return [member for member in self._members.values() if isinstance(member, DecodeMember)]

    def _placed(self, name: WorkerName | None, incarnation: str) -> Member | None:
        """The worker that a request was given to; None when it is gone, or another came back."""
        member = self._members.get(name) if name is not None else None
        is_other = member is not None and incarnation not in ("", member.info.incarnation)
        return None if is_other else member

    async def _keep(self, address: str) -> None:
        backoff = Backoff(RECONNECT_S, MAX_RECONNECT_S)
        while True:
            peer = Peer(address, self._clock, self._credentials)
            try:
                info = await peer.info(CONNECT_TIMEOUT_S)
                await self._require_unstuck(info, peer)
                await self._serve(info, peer, backoff)
            except TwophaseError as error:
                if isinstance(error, DeadlineExceeded):
                    backoff.reset()  # nobody listens: the connection itself tried, once a second
                self._note_error(address, str(error))
            except Exception as error:  # root of the task: the router lives, this worker is lost
                self._note_error(address, repr(error), bug=error)
            finally:
                await peer.close()
            if self._tasks.get(address) is not asyncio.current_task():
                return  # removed: a task group swallows a cancel that comes with an error in it
            await asyncio.sleep(backoff.next_s())

    def _note_error(self, address: str, text: str, *, bug: Exception | None = None) -> None:
        """Log an error when it is not the one that was logged last."""
        if self._last_errors.get(address) != text:
            self._last_errors[address] = text
            level = logging.INFO if bug is None else logging.ERROR
            self._log.log(level, "worker at %s: %s", address, text, exc_info=bug)

    async def _require_unstuck(self, info: WorkerInfo, peer: Peer) -> None:
        """Refuse a worker that was wedged and has done no step since."""
        stuck = self._stuck.at(peer.address)
        if stuck is not None and stuck.num_steps is not None:
            if stuck.is_wedged(info, (await peer.status(CONNECT_TIMEOUT_S)).num_steps):
                raise PeerLost(info.name, stuck.why)
        self._stuck.forget(peer.address)

    async def _serve(self, info: WorkerInfo, peer: Peer, backoff: Backoff) -> None:
        if info.name in self._members:
            other = self._members[info.name].peer.address
            raise PeerLost(peer.address, f"its name {info.name} is that of the worker at {other}")
        for other_member in self._members.values():
            if other_member.info.layout.weights_hash != info.layout.weights_hash:
                raise PeerLost(info.name, f"its weights are not those of {other_member.info.name}")
        member = DecodeMember(info, peer) if info.role is Role.DECODE else Member(info, peer)
        member.cold_until_s = self._clock.now_s() + self._warm_s
        self._members[info.name] = member
        self._log.info("%s connected at %s", info.name, peer.address)
        backoff.reset()
        self._last_errors.pop(peer.address, None)
        self._relieve()
        self.announce()
        error: TwophaseError | None = None
        try:
            await self._until_lost(member)
        except TwophaseError as caught:
            error = caught
            raise
        finally:
            del self._members[info.name]
            if isinstance(member, DecodeMember):
                member.close(lost(info.name, error))
            self.announce()
            end = "it stopped" if member.is_draining else error or "stream ended"
            self._log.warning("%s disconnected: %s", info.name, end)

    def _drain(self, member: Member) -> None:
        """Give a worker that is stopping nothing new, and its requests to others if there are."""
        is_news, member.is_draining = not member.is_draining, True
        self._relieve()  # each time: others may be there by now, or requests that were under way
        if is_news:
            self._log.info("%s is stopping", member.info.name)
            self.announce()

    def _relieve(self) -> None:
        """Hand over what stopping decode workers have, each if one like it can go on."""
        members, now_s = self._decode_members(), self._clock.now_s()
        layouts = [member.info.layout for member in members if member.is_usable(now_s)]
        for member in members:
            if member.is_draining and member.info.layout in layouts:
                member.hand_over(may_migrate=self._may_migrate)

    async def _until_lost(self, member: Member) -> None:
        """Return when the worker ends its session; raise PeerLost when it is stuck or gone."""
        errors: list[TwophaseError] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeat = tasks.create_task(self._heartbeat(member))
                if isinstance(member, DecodeMember):
                    await member.read(self._clock, lambda: self._drain(member))
                    heartbeat.cancel()
        except* TwophaseError as group:
            errors.extend(e for e in group.exceptions if isinstance(e, TwophaseError))
        if errors:
            raise errors[0]

    async def _heartbeat(self, member: Member) -> None:
        """Raise when the worker is silent or does no step; tokens are a sign of life."""
        while True:
            asked_s = self._clock.now_s()
            try:
                status = await member.peer.status(self._worker_timeout_s)
            except DeadlineExceeded:
                if member.last_heard_s < asked_s:
                    self._give_up(member, f"it has said nothing for {self._worker_timeout_s:g} s")
            else:
                self._look_at(member, status)
            await asyncio.sleep(HEARTBEAT_S)

    def _look_at(self, member: Member, status: WorkerStatus) -> None:
        member.status = status
        if status.is_draining or member.is_draining:
            self._drain(member)
        if member.steps.stalled_s(status, self._clock.now_s()) >= self._wedged_after_s:
            why = f"wedged: no step for {self._wedged_after_s:g} s while work waits"
            self._give_up(member, why, num_steps=status.num_steps)

    def _give_up(self, member: Member, why: str, *, num_steps: int | None = None) -> None:
        info, now_s = member.info, self._clock.now_s()
        stuck = Stuck(info.name, info.incarnation, why, now_s, num_steps)
        self._stuck.note(member.peer.address, stuck)
        raise PeerLost(info.name, why)
