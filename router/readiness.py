"""Ready means: a real token just went through the pools that are connected now.

Each time the fleet changes, the cluster is not ready until a probe request of a few tokens came
back whole. The health service tells it to load balancers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from core.clock import Clock
from core.errors import TwophaseError
from core.request import Request, RequestId, SamplingParams
from router.dispatch import Dispatcher
from router.fleet import Fleet

PROBE_ID = "readiness-probe-"
PROBE_TIMEOUT_S = 30.0
RETRY_S = 1.0

Announce = Callable[[bool], Awaitable[None]]


class Readiness:
    """Probes the cluster and announces each change."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        probe_token_ids: tuple[int, ...],
        *,
        announce: Announce,
        clock: Clock,
    ) -> None:
        self.is_ready = False
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._probe_token_ids = probe_token_ids
        self._announce = announce
        self._clock = clock
        self._num_probes = 0
        self._log = logging.getLogger("twophase.router")

    async def run(self) -> None:
        """Probe after every change of the fleet; never returns."""
        while True:
            changed = self._fleet.changed
            await self._set(await self._probe())
            if self.is_ready:
                await changed.wait()
            else:
                await self._wait_for_change(changed)

    def doubt(self) -> None:
        """A handoff failed: have the next probe tell whether any can succeed."""
        self._fleet.announce()

    async def _wait_for_change(self, changed: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await changed.wait()
        except TimeoutError:
            pass

    async def _probe(self) -> bool:
        self._num_probes += 1
        now_s = self._clock.now_s()
        request = Request(
            request_id=RequestId(f"{PROBE_ID}{self._num_probes}"),
            prompt_token_ids=self._probe_token_ids,
            # Two tokens: the first comes from prefill, the second only over the handoff.
            sampling=SamplingParams(max_tokens=2),
            deadline_s=now_s + PROBE_TIMEOUT_S,
        )
        try:
            await self._dispatcher.run(request, received_s=now_s, tokenize_s=0.0, deliver=_discard)
        except TwophaseError as error:
            self._log.info("not ready: %s", error)
            return False
        return True

    async def _set(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._log.info("the cluster is %s", "ready" if is_ready else "not ready")
            await self._announce(is_ready)


async def _discard(token_ids: list[int]) -> None:
    """The probe's tokens go nowhere."""
