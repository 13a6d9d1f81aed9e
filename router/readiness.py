"""Ready means: a real token just went through the pools that are connected now.

    a worker connects --> it is cold: others go first (`members.fleet`)
      --> a probe of two tokens through each of its pairs, all at once: links are made and tested
      --> it is warm, after `router.warm_s` at the latest; what could not be reached is told

Each time the fleet changes otherwise, or a handoff failed, every other pair is probed in turn. The
cluster is ready while one pair works. The health service tells it to load balancers.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from core.clock import Clock
from core.config import Mode
from core.errors import TwophaseError
from core.request import PROBE_ID, OutputToken, Request, RequestId, SamplingParams, WorkerName
from core.worker import Role
from router.answer import Answer
from router.dispatch import Dispatcher
from router.members.fleet import Fleet
from router.members.member import Member
from router.placing.placement import Placement

PROBE_TIMEOUT_S = 30.0
RETRY_S = 1.0
# Pairs that are left out link on demand.
MAX_PROBES = 64

Announce = Callable[[bool], Awaitable[None]]


class Readiness:
    """Probes the cluster and announces each change."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        probe_token_ids: tuple[int, ...],
        *,
        mode: Mode,
        announce: Announce,
        clock: Clock,
    ) -> None:
        self.is_ready = False
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._probe_token_ids = probe_token_ids
        self._mode = mode
        self._announce = announce
        self._clock = clock
        # Other routers probe the same workers.
        self._probe_id = f"{PROBE_ID}{secrets.token_hex(4)}-"
        self._num_probes = 0
        # Pairs that worked since the others were last looked at.
        self._fresh: set[Placement] = set()
        self._log = logging.getLogger("twophase.router")

    async def run(self) -> None:
        """Probe after every change of the fleet; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_warm())
            tasks.create_task(self._keep_ready())

    async def _keep_warm(self) -> None:
        while True:
            changed = self._fleet.changed
            if cold := self._fleet.cold:
                await self._warm(cold)
            else:
                await changed.wait()

    async def _keep_ready(self) -> None:
        while True:
            changed = self._fleet.changed
            await self._probe_pairs()
            if self.is_ready:
                await changed.wait()
            else:
                await self._wait_for_change(changed)

    async def _wait_for_change(self, changed: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await changed.wait()
        except TimeoutError:
            pass

    async def _warm(self, cold: list[Member]) -> None:
        """Probe all pairs of these workers, at once; they are given requests then."""
        names = {member.info.name for member in cold}
        pairs = [pair for pair in self._pairs() if _members(pair) & names][:MAX_PROBES]
        started_s = self._clock.now_s()
        until_s = max(member.cold_until_s for member in cold)
        works = await asyncio.gather(*(self._probe(pair, until_s) for pair in pairs))
        self._fresh.update(
            pair for pair, has_worked in zip(pairs, works, strict=True) if has_worked
        )
        self._log.info(
            "%s: %d of %d links are tested, in %.3f s",
            ", ".join(sorted(names)),
            sum(works),
            len(pairs),
            self._clock.now_s() - started_s,
        )
        self._fleet.warmed(cold)

    async def _probe_pairs(self) -> None:
        """Probe each pair once: it is ready with the first that works.

        Those of cold workers are being probed, and those that just were need it no more.
        """
        fresh, self._fresh = self._fresh, set()
        if works := bool(fresh):
            await self._set(True)
        cold = {member.info.name for member in self._fleet.cold}
        for pair in self._pairs()[:MAX_PROBES]:
            until_s = self._clock.now_s() + PROBE_TIMEOUT_S
            if pair in fresh or _members(pair) & cold:
                continue
            if await self._probe(pair, until_s):
                works = True
                await self._set(True)
        await self._set(works)

    def _pairs(self) -> list[Placement]:
        """Every pair of workers."""
        decode = self._names(Role.DECODE)
        prefill: list[WorkerName | None] = [*self._names(Role.PREFILL)]
        readers = prefill if self._mode is Mode.DISAGGREGATED else [None]
        return [Placement(p, d, "probe") for d in decode for p in readers]

    def _names(self, role: Role) -> list[WorkerName]:
        return [m.info.name for m in self._fleet.members(role) if not m.is_draining]

    async def _probe(self, placement: Placement, until_s: float) -> bool:
        self._num_probes += 1
        now_s = self._clock.now_s()
        request = Request(
            request_id=RequestId(f"{self._probe_id}{self._num_probes}"),
            prompt_token_ids=self._probe_token_ids,
            # Two tokens: the first comes from prefill, the second only over the handoff.
            sampling=SamplingParams(max_tokens=2),
            deadline_s=until_s,
        )
        try:
            await self._dispatcher.run(
                Answer(request, now_s, 0.0), deliver=_discard, placement=placement
            )
        except TwophaseError as error:
            readers = placement.prefill or placement.decode
            self._log.warning("no token from %s to %s: %s", readers, placement.decode, error)
            return False
        return True

    async def _set(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._log.info("the cluster is %s", "ready" if is_ready else "not ready")
            await self._announce(is_ready)


def _members(pair: Placement) -> set[WorkerName | None]:
    return {pair.prefill, pair.decode}


async def _discard(tokens: list[OutputToken]) -> None:
    """The probe's tokens go nowhere."""
