"""One chaos run: a cluster of child processes, a load, faults beside it, and what became of it all.

1 every stream once, without faults: what is right
2 streams without a pause while, every few seconds, a worker or a router is killed or paused;
  clients know every router
3 the last streams end; whatever is still held, or lives on after the cluster, is told
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from core.config import ClusterConfig
from core.settings.chaos import ChaosConfig, FaultKind
from deploy.chaos.faults import Fault, next_fault
from deploy.chaos.harm import harm
from deploy.chaos.load import Stream, run_stream
from deploy.chaos.watch import Watch
from deploy.local_cluster import LocalCluster, local_cluster
from deploy.own_client import wait_until_ready
from twophase.client import AsyncClient

READY_TIMEOUT_S = 120.0
SETTLE_S = 30.0
LOOK_S = 0.1
END_S = 5.0
# What Python and gRPC may keep; a leak of a request's tokens alone would pass it in a long run.
MAX_GROWTH_BYTES = 64 << 20

_log = logging.getLogger("twophase.chaos")


@dataclass(slots=True)
class Outcome:
    """What happened.

    left names what was not given back; leaked are processes that outlived the cluster;
    growth_bytes is what the router's memory grew by, after each stream had run once.
    """

    expected: dict[int, Stream] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    leaked: tuple[int, ...] = ()
    growth_bytes: int = 0

    @property
    def num_wrong(self) -> int:
        """Streams that did not complete, or differ from their run without faults."""
        return sum(not self.is_right(stream) for stream in self.streams)

    def is_right(self, stream: Stream) -> bool:
        """Whether it completed with the tokens of its run without faults."""
        expected = self.expected[stream.number]
        return stream.error is None and stream.first_difference(expected) is None

    @property
    def is_clean(self) -> bool:
        """Whether nothing that was promised was broken."""
        is_flat = self.growth_bytes <= MAX_GROWTH_BYTES
        return not (self.num_wrong or self.left or self.leaked) and is_flat


def run_chaos(config: ClusterConfig, tell: Callable[[str], None]) -> Outcome:
    """Run it; `tell` is called with a line about each step and each fault.

    Raises:
        TwophaseError: the cluster does not start, or a stream fails before the first fault.
    """
    outcome = Outcome()
    num_routers = config.chaos.routers
    with local_cluster(config, tell=tell, replace_lost=True, num_routers=num_routers) as cluster:
        for address in cluster.addresses:
            wait_until_ready(address, config.security, READY_TIMEOUT_S)
        run = _Run(cluster, config, outcome, tell)
        asyncio.run(run.run())
    _, alive = psutil.wait_procs(run.processes, timeout=END_S)
    outcome.leaked = tuple(sorted(process.pid for process in alive))
    return outcome


class _Run:
    def __init__(
        self,
        cluster: LocalCluster,
        config: ClusterConfig,
        outcome: Outcome,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._chaos: ChaosConfig = config.chaos
        # All that belonged to a server which was hit, or was there at the end.
        self.processes: set[psutil.Process] = set()
        self._outcome = outcome
        self._tell = tell
        self._draw = random.Random(self._chaos.seed)
        self._harmed: set[str] = set()
        self._vocab_size = 0

    async def run(self) -> None:
        """All of it, but for the end of the processes."""
        security = self._config.security
        secret, tls = security.read_cluster_secret(), security.own_client_tls
        async with (
            AsyncClient(self._cluster.addresses, api_key=secret, tls=tls) as client,
            Watch(self._cluster, security) as watch,
        ):
            self._vocab_size = (await client.model()).vocab_size
            await self._run_without_faults(client)
            await watch.measure()
            until_s = time.monotonic() + self._chaos.duration_s
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._chaos.streams):
                    tasks.create_task(self._again_and_again(client, number, until_s))
                tasks.create_task(self._inject(watch, until_s))
            await self._settle(watch)
            self._outcome.growth_bytes = watch.growth_bytes
            for child in self._cluster.children.values():
                self._note(child.process.pid)

    async def _run_without_faults(self, client: AsyncClient) -> None:
        streams = await asyncio.gather(
            *(self._stream(client, number) for number in range(self._chaos.streams))
        )
        for stream in streams:
            if stream.error is not None:
                raise stream.error
            self._outcome.expected[stream.number] = stream

    async def _stream(self, client: AsyncClient, number: int) -> Stream:
        return await run_stream(
            client, number, max_tokens=self._chaos.max_tokens, vocab_size=self._vocab_size
        )

    async def _again_and_again(self, client: AsyncClient, number: int, until_s: float) -> None:
        while time.monotonic() < until_s:
            self._outcome.streams.append(await self._stream(client, number))

    async def _inject(self, watch: Watch, until_s: float) -> None:
        """A fault every few seconds; what can be undone is undone, whatever happens."""
        kinds: set[FaultKind] = set()
        async with asyncio.TaskGroup() as harms:
            while time.monotonic() + self._chaos.every_s < until_s:
                await asyncio.sleep(self._chaos.every_s)
                up = [server for server in await watch.up() if server not in self._harmed]
                kinds = kinds or {*self._chaos.faults}  # each comes before one comes again
                fault = next_fault(sorted(kinds), up, self._draw)
                await watch.measure()
                if fault is None:
                    self._tell("nobody can be spared: no fault")
                    continue
                self._tell(f"{fault.kind} {fault.target}")
                self._outcome.faults.append(fault)
                kinds.discard(fault.kind)
                harms.create_task(self._harm(fault))

    async def _harm(self, fault: Fault) -> None:
        pid = self._cluster.children[fault.target].process.pid
        self._note(pid)
        self._harmed.add(fault.target)
        try:
            await harm(fault.kind, pid, self._chaos.pause_s)
        finally:
            self._harmed.discard(fault.target)

    def _note(self, pid: int) -> None:
        """Whatever becomes of this process and its own, it must have ended with the cluster."""
        try:
            process = psutil.Process(pid)
            self.processes |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            _log.info("process %d has ended by itself", pid)

    async def _settle(self, watch: Watch) -> None:
        """Note what is held once everybody is back, or after SETTLE_S."""
        until_s = time.monotonic() + SETTLE_S
        while (left := await watch.held()) and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
        await watch.measure()
        self._outcome.left = left
