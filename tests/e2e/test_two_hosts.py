"""Two Ray nodes with addresses of their own, in two network namespaces; then one is cut off.

Needs root and `ip`. Namespaces, their processes and files are removed whatever happens.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from core.config import load_config
from deploy.local_cluster import local_cluster

ROOT = Path(__file__).resolve().parent.parent.parent
LATE_S = 240.0
GCS = "10.77.0.1:6399"
# Ray notices with the health checks below in some seconds; with its own settings in a minute.
NOTICED_S = 15.0
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
CLUSTER = {
    "prefill": {"replicas": 2, "kv_cache": "16MiB", "resources": {"strategy": "SPREAD"}},
    "decode": {"replicas": 2, "kv_cache": "16MiB", "resources": {"strategy": "SPREAD"}},
    "engine": {"max_context_tokens": 1024},
    "transfer": {"backend": "torch"},
    "router": {"resources": {"front": 1}, "worker_timeout_s": 3, "max_wait_s": 60},
    "security": {"insecure": True},  # the namespaces are nobody else's
}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need Linux, root and ip",
    ),
]


def ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=LATE_S
    ).stdout


@dataclass(frozen=True)
class Host:
    """A network namespace with one address, and /etc/hosts as some images have it."""

    name: str
    address: str
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, **changes: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *words],
            env=self.environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *words: str, **changes: str) -> tuple[int, str]:
        process = self.start(*words, **changes)
        out, err = process.communicate(timeout=LATE_S)
        return process.returncode, " ".join((out + err).split())

    def twophase(self, *words: str, **changes: str) -> tuple[int, str]:
        return self.run(sys.executable, "-m", "deploy.cli", *words, **changes)

    def end_all(self) -> None:
        """End every process that is in the namespace."""
        deadline_s = time.monotonic() + LATE_S
        while pids := ip("netns", "pids", self.name).split():
            assert time.monotonic() < deadline_s, pids
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        for process in self.processes:
            process.communicate(timeout=LATE_S)


@contextmanager
def namespace(name: str, address: str, environment: dict[str, str]) -> Iterator[Host]:
    files = Path("/etc/netns") / name  # `ip netns exec` shows them as /etc/...
    with ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        files.mkdir(parents=True)
        stack.callback(shutil.rmtree, files)
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
        (files / "hosts").write_text(hosts)
        host = Host(name, address, environment)
        stack.callback(host.end_all)
        ip("-n", name, "link", "set", "lo", "up")
        yield host


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a cable, whose Ray asks for a token."""
    token = tmp_path / "token"
    token.write_text("k" * 64)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        **HEALTH_CHECKS,
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
    }
    mark = f"tp{os.getpid()}"
    cable = (f"{mark}a", f"{mark}b")
    # Ray's own paths must be short: they are names of Unix sockets.
    temporary = Path(f"/tmp/{mark}")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        pair = [
            stack.enter_context(namespace(name, f"10.77.0.{number}", environment))
            for number, name in enumerate(cable, start=1)
        ]
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for host in pair:
            ip("link", "set", host.name, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.name)
            ip("-n", host.name, "link", "set", host.name, "up")
        start_ray(pair[0], "--head", "--port=6399", '--resources={"front": 1}', temporary=temporary)
        start_ray(pair[1], f"--address={GCS}", temporary=temporary)
        yield pair[0], pair[1]


def start_ray(host: Host, *words: str, temporary: Path) -> None:
    head = "--head" in words
    own = (f"--temp-dir={temporary}", "--include-dashboard=false") if head else ()
    process = host.start(
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=6"),
        *(f"--node-ip-address={host.address}", "--object-store-memory=80000000", *own, *words),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ray runtime started" in line:
            return
    raise AssertionError(process.stderr.read() if process.stderr else "")


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    assert process.wait(LATE_S) == 0, process.stderr.read() if process.stderr else ""


def streams(host: Host, address: str) -> Iterator[dict]:
    return lines_of(host.start(sys.executable, "-m", "tests.e2e.on_host", "streams", address))


@pytest.mark.case("B-153")
@pytest.mark.timeout(900)
def test_kv_goes_between_hosts_and_streams_outlive_the_loss_of_one(
    tiny_model_directory: Path, tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    here, there = hosts
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"model": str(tiny_model_directory), **CLUSTER}))
    up = ("up", str(cluster), f"--address={GCS}")

    # 1 who cannot join is told why
    code, said = here.twophase(*up, RAY_AUTH_MODE="disabled")
    assert code == 2 and "RAY_AUTH_MODE: is disabled here and token in the cluster" in said, said
    code, said = here.twophase("down", f"--address={GCS}")
    assert code == 2 and "no cluster 'main' runs there" in said, said

    # 2 one command, and the cluster stays when it has returned; every address is its node's,
    # though both hosts' own name stands for 127.0.1.1
    code, said = here.twophase(*up)
    found = re.search(r"gRPC at (10\.77\.0\.1:8100),", said)
    assert code == 0 and found, said
    address = found[1]

    # 3 the tokens are those of one process, and KV went over gloo between the hosts
    whole = load_config(
        None,
        [
            *(f"model={tiny_model_directory}", "mode=chunked", "decode.kv_cache=64MiB"),
            *("router.port=0", "router.http_port=null", "engine.max_context_tokens=1024"),
        ],
    )
    with local_cluster(whole, tell=lambda line: None) as alone:
        words = (sys.executable, "-m", "tests.e2e.on_host", "streams", alone.address)
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LATE_S)
    expected = json.loads(told.stdout.splitlines()[-1])
    *_, peaceful = streams(here, address)
    assert peaceful["answers"] == expected["answers"]
    assert peaceful["failures"] == []
    assert set(peaceful["links"]) == {"torch"} and len(peaceful["links"]) > 2

    # 4 the other host is cut off: Ray notices in seconds, streams go on here
    watch = here.start(sys.executable, "-m", "tests.e2e.on_host", "nodes", GCS)
    watched = lines_of(watch)
    assert next(watched)["num_alive"] == 2
    told = streams(here, address)
    assert next(told)["begun"]
    ip("-n", there.name, "link", "set", there.name, "down")
    cut_s = time.monotonic()
    ended = next(told)
    assert ended["answers"] == expected["answers"]
    assert ended["failures"]
    noticed = next(watched)
    assert noticed["num_alive"] == 1
    assert noticed["now_s"] - cut_s < NOTICED_S
    watch.kill()

    # 5 what was lost comes back on the host that is left
    deadline_s = time.monotonic() + LATE_S
    while len(workers := next(iter(list(streams(here, address))[-1:]))["workers"]) < 4:
        assert time.monotonic() < deadline_s, workers
    code, said = here.twophase("down", "--address=ray://10.77.0.1:10001")
    assert code == 0 and "5 servers of main stopped" in said, said
