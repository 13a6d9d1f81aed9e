"""One small cluster for all fuzzing; `make fuzz` asks for more requests than the test suite."""

import asyncio

import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from deploy.local_cluster import local_cluster
from tests.tiny_model import write_tiny_model
from twophase.client import AsyncClient

OPTION = "--num-fuzz-requests"
SETUP = ("engine.max_context_tokens=192", "decode.kv_cache=2MiB", "prefill.kv_cache=2MiB")


def pytest_addoption(parser):
    parser.addoption(OPTION, type=int, default=200, help="requests of each kind of fuzzing")


@pytest.fixture(scope="session")
def num_requests(pytestconfig):
    return pytestconfig.getoption(OPTION, 200)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    ports = ("router.port=0", "router.http_port=0")
    config = load_config(None, [f"model={model}", *ports, *SETUP])
    logs = tmp_path_factory.mktemp("logs")
    with local_cluster(config, tell=lambda line: None, log_directory=logs) as running:
        asyncio.run(_until_ready(running.address))
        yield running


async def _until_ready(address):
    async with AsyncClient(address) as client:
        await wait_until_ready(client)
