"""A cluster with TLS, keys and a secret, as `twophase serve` starts it; and what strangers get."""

import asyncio
import os
import pickle
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
import yaml

from core.clock import MonotonicClock
from core.errors import PeerLost, PermissionDenied, TwophaseError, Unauthenticated
from core.settings.security import Tls
from router.keys import new_key
from tests.certificates import Authority
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.e2e.strangers import listening_ports, pickle_of, visit_all
from twophase.client import AsyncClient, Client, Sampling
from twophase.credentials import Credentials
from twophase.peer import Peer
from twophase.v1 import worker_pb2_grpc

SMALL = ("decode.kv_cache=2MiB", "prefill.kv_cache=2MiB", "engine.max_context_tokens=512")
USER, ADMIN, STRANGER = new_key("alice"), new_key(), new_key()
SECRET = new_key()[0]
SHORT = Sampling(max_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Secured:
    """A running `twophase serve` and what its clients need."""

    address: str
    url: str
    tls: Tls
    internal: Tls
    process: subprocess.Popen[str]
    directory: Path


@pytest.fixture(scope="module")
def secured(
    tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    front = Authority(directory / "front").issue("front", "127.0.0.1")
    internal = Authority(directory / "internal").issue("internal", "worker.twophase")
    (directory / "users").write_text(USER[1])
    (directory / "admins").write_text(ADMIN[1])
    security = {
        "api_keys": str(directory / "users"),
        "admin_keys": str(directory / "admins"),
        "certificate": str(front.certificate),
        "private_key": str(front.private_key),
        "cluster_secret": "env:THE_SECRET",
        "internal_certificate": str(internal.certificate),
        "internal_private_key": str(internal.private_key),
        "internal_ca": str(internal.ca),
        "internal_server_name": "worker.twophase",
    }
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({"security": security}))
    with (directory / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "deploy.cli", "serve", "--without-ray", str(file)),
                *(f"model={tiny_model_directory}", "router.port=0", "router.http_port=0", *SMALL),
            ],
            env={**os.environ, "THE_SECRET": SECRET, "TMPDIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"gRPC at (\S+:\d+), HTTP at (https://\S+:\d+), mode", ready)
        assert found, (ready, (directory / "stderr").read_text())
        yield Secured(found[1], found[2], Tls(front.ca), internal, process, directory)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def text_of(cluster: Secured, key: str | None) -> str:
    with Client(cluster.address, api_key=key, tls=cluster.tls) as client:
        return "".join(chunk.text for chunk in client.generate([1, 2, 3], SHORT))


def test_the_right_key_works_over_grpc_and_http_and_no_other_does(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.tls.ca)
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "temperature": 0}

    def post(key: str) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        url = f"{secured.url}/v1/completions"
        return httpx2.post(url, json=body, headers=headers, verify=context)

    assert text_of(secured, USER[0]) == post(USER[0]).json()["choices"][0]["text"]
    for key in (None, STRANGER[0], USER[1].split()[0]):
        with pytest.raises(Unauthenticated, match="missing or wrong"):
            text_of(secured, key)
    assert post(STRANGER[0]).status_code == 401
    assert httpx2.get(f"{secured.url}/ready", verify=context).status_code == 200
    with Client(secured.address, api_key=USER[0]) as client, pytest.raises(PeerLost):
        client.model(timeout_s=2)  # without TLS


def test_the_admin_service_wants_an_admin_key(secured: Secured) -> None:
    shown = {"api_key": ADMIN[0], "tls": secured.tls}
    with Client(secured.address, **shown) as client:
        assert {worker.role for worker in client.status().workers} == {"prefill", "decode"}
    with Client(secured.address, api_key=USER[0], tls=secured.tls) as client:
        with pytest.raises(PermissionDenied, match="needs an admin key"):
            client.status()
    environment = {**os.environ, "TWOPHASE_API_KEY": ADMIN[0]}
    command = [sys.executable, "-m", "deploy.cli", "--ca", str(secured.tls.ca), "status"]
    result = subprocess.run(
        [*command, "--address", secured.address], env=environment, capture_output=True, text=True
    )
    assert (result.returncode, "decode-0" in result.stdout) == (0, True), result.stderr
    asyncio.run(assert_nothing_left(secured.address, **shown))


async def test_a_worker_refuses_strangers_also_with_a_certificate(secured: Secured) -> None:
    async with AsyncClient(secured.address, api_key=ADMIN[0], tls=secured.tls) as client:
        workers = [worker.address for worker in (await client.status()).workers]
    tls = Tls(
        secured.internal.ca,
        secured.internal.certificate,
        secured.internal.private_key,
        "worker.twophase",
    )
    for address in workers:
        for shown in (Credentials(tls=tls), Credentials(USER[0], tls), Credentials(SECRET)):
            peer = Peer(address, MonotonicClock(), shown)
            with pytest.raises((PeerLost, TwophaseError)):
                await peer.blocks(timeout_s=2)
            with pytest.raises(PeerLost):
                await anext(aiter(peer.link()))
            await peer.close()
        channel = Credentials(STRANGER[0], tls).open_channel(grpc.aio, address, ())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).GetInfo(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()
    assert await asyncio.to_thread(text_of, secured, USER[0])


def test_secrets_stand_in_no_log_and_no_command_line(secured: Secured) -> None:
    with pytest.raises(Unauthenticated):
        text_of(secured, STRANGER[0])
    parent = psutil.Process(secured.process.pid)
    words = [" ".join(p.cmdline()) for p in (parent, *parent.children(recursive=True))]
    logs = [*secured.directory.rglob("*.log"), secured.directory / "stderr"]
    texts = [*words, *(log.read_text() for log in logs)]

    assert len(words) >= 4 and len(logs) >= 4
    for secret in (USER[0], ADMIN[0], STRANGER[0], SECRET):
        assert not [text for text in texts if secret in text]


def test_strangers_at_the_ports_of_a_secured_cluster_change_nothing(
    secured: Secured, tmp_path: Path
) -> None:
    before = text_of(secured, USER[0])
    ports = listening_ports([secured.process.pid])
    visit_all(ports, tmp_path / "marker")

    assert len(ports) >= 5 and {host for host, _ in ports} == {"127.0.0.1"}
    assert not (tmp_path / "marker").exists()
    assert text_of(secured, USER[0]) == before
    assert listening_ports([secured.process.pid]) == ports
    asyncio.run(assert_nothing_left(secured.address, api_key=ADMIN[0], tls=secured.tls))


def test_the_pickle_of_the_strangers_leaves_its_mark_where_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(pickle_of(tmp_path / "marker"))
    assert (tmp_path / "marker").exists()


@pytest.mark.case("B-157")
def test_no_port_unpickles_or_falls_over_what_strangers_send(
    tiny_model_directory: Path, start_cluster: StartCluster, tmp_path: Path
) -> None:
    # The stores and the sockets of both: of a link, and of a worker's ranks.
    setup = ("transfer.backend=torch", "decode.tensor_parallel=2")
    cluster = start_cluster(tiny_model_directory, *SMALL, *setup)
    pids = [child.process.pid for child in cluster.children.values()]
    ports = listening_ports(pids)
    with Client(cluster.address) as client:
        before = [chunk.text for chunk in client.generate([1, 2, 3], SHORT)]
        visit_all(ports, tmp_path / "marker")
        after = [chunk.text for chunk in client.generate([1, 2, 3], SHORT)]

    assert len(ports) >= 6
    assert {host for host, _ in ports} == {"127.0.0.1"}
    assert not (tmp_path / "marker").exists()
    assert "".join(after) == "".join(before)
    assert listening_ports(pids) == ports
    asyncio.run(assert_nothing_left(cluster.address))
