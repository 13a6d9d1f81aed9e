"""Real clusters in child processes: one per set-up, shared by the tests of a module."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from core.listing import WorkerState
from deploy.local_cluster import LocalCluster, local_cluster
from tests.tiny_model import write_tiny_model
from twophase.client import AsyncClient

WARM_S = 60.0

StartCluster = Callable[..., LocalCluster]


@pytest.fixture(scope="session")
def tiny_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Starts clusters by key=value overrides; the same overrides give the same cluster."""
    running: dict[tuple[str, ...], LocalCluster] = {}
    with ExitStack() as stack:

        def start(model: Path, *overrides: str) -> LocalCluster:
            key = (str(model), *overrides)
            if key not in running:
                ports = ("router.port=0", "router.http_port=0")
                config = load_config(None, [f"model={model}", *ports, *overrides])
                logs = tmp_path_factory.mktemp("logs")
                running[key] = stack.enter_context(
                    local_cluster(config, tell=lambda line: None, log_directory=logs)
                )
                asyncio.run(_ready(running[key].address))
            return running[key]

        yield start


async def _ready(address: str) -> None:
    async with AsyncClient(address) as client:
        await wait_until_ready(client)
        # A worker whose links are not yet tested is given nothing while others can serve.
        async with asyncio.timeout(WARM_S):
            while WorkerState.WARMING in {w.state for w in await client.admin.workers()}:
                await asyncio.sleep(0.05)
