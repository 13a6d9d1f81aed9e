"""One chaos run: a cluster of child processes, a load, faults beside it, and what became of it all.

1 every stream once, without faults: what is right
2 streams without a pause while, every few seconds, a worker is killed or paused
3 the last streams end; whatever is still held, or lives on after the cluster, is told
"""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from core.chaos import ChaosConfig, FaultKind
from core.config import ClusterConfig
from core.request import WorkerName
from deploy.chaos.faults import Fault, next_fault
from deploy.chaos.load import Stream, run_stream
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
    with local_cluster(config, tell=tell, replace_lost=True) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)
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
        self._chaos: ChaosConfig = config.chaos
        self._secret = config.security.read_cluster_secret()
        self._tls = config.security.own_client_tls
        # All that belonged to a server which was hit, or was there at the end.
        self.processes: set[psutil.Process] = set()
        self._outcome = outcome
        self._tell = tell
        self._draw = random.Random(self._chaos.seed)
        self._vocab_size = 0

    async def run(self) -> None:
        """All of it, but for the end of the processes."""
        async with AsyncClient(
            self._cluster.address, api_key=self._secret, tls=self._tls
        ) as client:
            self._vocab_size = (await client.model()).vocab_size
            await self._run_without_faults(client)
            router = psutil.Process(self._cluster.children["router"].process.pid)
            before_bytes = router.memory_info().rss
            until_s = time.monotonic() + self._chaos.duration_s
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._chaos.streams):
                    tasks.create_task(self._again_and_again(client, number, until_s))
                tasks.create_task(self._inject(client, until_s))
            await self._settle(client)
            self._outcome.growth_bytes = router.memory_info().rss - before_bytes
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

    async def _inject(self, client: AsyncClient, until_s: float) -> None:
        """A fault every few seconds; each paused worker goes on, whatever happens."""
        async with asyncio.TaskGroup() as pauses:
            while time.monotonic() + self._chaos.every_s < until_s:
                await asyncio.sleep(self._chaos.every_s)
                fault = next_fault(self._chaos.faults, await self._up(client), self._draw)
                if fault is None:
                    self._tell("no worker can be spared: no fault")
                    continue
                self._tell(f"{fault.kind} {fault.worker}")
                self._outcome.faults.append(fault)
                process = self._cluster.children[fault.worker].process
                self._note(process.pid)
                if fault.kind is FaultKind.KILL:
                    process.kill()
                else:
                    pauses.create_task(self._pause(process.pid))

    def _note(self, pid: int) -> None:
        """Whatever becomes of this process and its own, it must have ended with the cluster."""
        try:
            process = psutil.Process(pid)
            self.processes |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            _log.info("process %d has ended by itself", pid)

    async def _pause(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chaos.pause_s)
        finally:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                _log.info("process %d was replaced while it was paused", pid)

    async def _up(self, client: AsyncClient) -> Sequence[WorkerName]:
        """Workers that the router is connected to, that answer, and that run."""
        status = await client.status()
        running = {
            name for name, child in self._cluster.children.items() if _is_running(child.process.pid)
        }
        return [worker.name for worker in status.workers if worker.name in running]

    async def _settle(self, client: AsyncClient) -> None:
        """Note what is held once every worker is back, or after SETTLE_S."""
        num_workers = len(self._cluster.children) - 1
        until_s = time.monotonic() + SETTLE_S
        while True:
            status = await client.status()
            left = {what: count for what, count in status.held.items() if count}
            if len(status.workers) < num_workers:
                left["workers that are not back"] = num_workers - len(status.workers)
            if not left or time.monotonic() > until_s:
                self._outcome.left = left
                return
            await asyncio.sleep(LOOK_S)


def _is_running(pid: int) -> bool:
    """Whether the process is there and not stopped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
