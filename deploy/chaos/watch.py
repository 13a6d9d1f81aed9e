"""What the operator of a chaos run sees: who is up, what is held, how large the routers grew."""

import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import psutil

from core.errors import TwophaseError
from core.settings.security import SecurityConfig
from deploy.chaos.faults import pool_of
from deploy.local_cluster import LocalCluster
from twophase.client import AsyncClient
from twophase.client.messages import ClusterStatus

# A router that is silent for longer is not up.
ANSWER_S = 2.0

_log = logging.getLogger("twophase.chaos")


class Watch:
    """Asks every router of a cluster; an async context."""

    def __init__(self, cluster: LocalCluster, security: SecurityConfig) -> None:
        self._cluster = cluster
        self._security = security
        self._clients: dict[str, AsyncClient] = {}
        self._stack = AsyncExitStack()
        self._sizes: dict[psutil.Process, tuple[int, int]] = {}

    async def up(self) -> list[str]:
        """Routers that are ready, and workers that all of those are connected to; all that run."""
        ready = {n: status for n, status in (await self._statuses()).items() if status.is_ready}
        running = {n for n, c in self._cluster.children.items() if _is_running(c.process.pid)}
        up = running & ready.keys()
        if up:
            up |= running.intersection(
                *({worker.name for worker in status.workers} for status in ready.values())
            )
        return sorted(up)

    async def held(self) -> dict[str, int]:
        """What is still held, by what it is, as each router sees it; empty when nothing is."""
        statuses = await self._statuses()
        left = {
            f"{what} ({name})": count
            for name, status in statuses.items()
            for what, count in status.held.items()
            if count
        }
        num_workers = len(self._cluster.children) - len(self._clients)
        missing = sum(num_workers - len(status.workers) for status in statuses.values())
        silent = len(self._clients) - len(statuses)
        others = {"workers that are not back": missing, "routers that are not back": silent}
        return left | {what: count for what, count in others.items() if count}

    async def measure(self) -> None:
        """Note how large the routers are that are ready: one that starts is not yet what it is."""
        for name in self._clients.keys() & {*await self.up()}:
            try:
                process = psutil.Process(self._cluster.children[name].process.pid)
                size_bytes = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            first_bytes, _ = self._sizes.get(process, (size_bytes, size_bytes))
            self._sizes[process] = (first_bytes, size_bytes)

    @property
    def growth_bytes(self) -> int:
        """The most that one router grew by, from when it was measured first."""
        return max((last - first for first, last in self._sizes.values()), default=0)

    async def _statuses(self) -> dict[str, ClusterStatus]:
        statuses = {}
        for name, client in self._clients.items():
            try:
                statuses[name] = await client.status(timeout_s=ANSWER_S)
            except TwophaseError as error:
                _log.info("%s does not answer: %s", name, error)
        return statuses

    async def __aenter__(self) -> Self:
        """Connect to each router."""
        secret, tls = self._security.read_cluster_secret(), self._security.own_client_tls
        for name, child in self._cluster.children.items():
            if pool_of(name) == "router":
                client = AsyncClient(child.address, api_key=secret, tls=tls)
                self._clients[name] = await self._stack.enter_async_context(client)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        await self._stack.aclose()


def _is_running(pid: int) -> bool:
    """Whether the process is there and not stopped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
