"""No server serves strangers beyond its machine unless it is told to."""

import asyncio
import socket
from dataclasses import replace

import pytest

from core.config import load_config
from core.errors import ConfigError, ModelError
from decode_worker.config import DecodeWorkerConfig
from deploy.server import server_of
from prefill_worker.config import PrefillWorkerConfig
from router.config import FrontDoorConfig


def configs(*overrides):
    """Each role, listening beyond loopback, of a model that does not exist."""
    cluster = load_config(None, ["model=/no/such/model", "router.host=0.0.0.0", *overrides])
    workers = (DecodeWorkerConfig, PrefillWorkerConfig)
    return [
        *(kind.from_cluster(cluster, listen="0.0.0.0:0") for kind in workers),
        FrontDoorConfig.from_cluster(cluster),
    ]


async def start(config):
    await server_of(config)(asyncio.Event(), lambda address: None)


@pytest.mark.parametrize("role", range(3), ids=["decode", "prefill", "router"])
async def test_an_open_server_refuses_to_listen_beyond_loopback(role):
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:\d+ can be reached from other machines"):
        await start(configs()[role])
    # Told to, it goes on to the next obstacle.
    with pytest.raises(ModelError):
        await start(configs("security.insecure=true")[role])


@pytest.mark.parametrize("role", range(2), ids=["decode", "prefill"])
async def test_a_worker_with_a_secret_may_listen_and_one_on_loopback_needs_none(role, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(40 * "s")
    for config in (
        configs(f"security.cluster_secret={secret}")[role],
        replace(configs()[role], listen="127.0.0.1:0"),
    ):
        with pytest.raises(ModelError):
            await start(config)


@pytest.mark.case("B-153")
@pytest.mark.parametrize("role", range(3), ids=["decode", "prefill", "router"])
async def test_a_name_that_stands_for_loopback_is_refused(role, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: found)
    config = configs("security.insecure=true", "router.host=myhost")[role]
    if role < 2:
        config = replace(config, listen="myhost:7001")
    with pytest.raises(ConfigError) as refused:
        await start(config)
    assert refused.value.path == ("router.host" if role == 2 else "listen")
    assert "stands for 127.0.1.1 on this machine, which no other reaches" in str(refused.value)
    found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)))
    with pytest.raises(ModelError):  # a name that others reach, too
        await start(config)
