"""A stop fits the time that an orchestrator leaves, and containers' small shared memory is told."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.errors import PeerLost, TwophaseError
from tests.e2e.test_commands import STOP_S, _serving
from tests.tiny_model import write_tiny_model
from twophase.client import Client, Sampling

DRAIN_S = 3.0
# What `docker stop` leaves before it kills.
GRACE_S = 10.0
SHORT_S = 0.5


@pytest.mark.case("B-159")
@pytest.mark.timeout(120)
def test_a_stop_lets_short_streams_end_and_tells_long_ones_before_the_hard_kill(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "long", overrides={"max_position_embeddings": 1 << 17})
    setup = (
        *(f"model={model}", "mode=chunked", "decode.kv_cache=160MiB"),
        *(f"router.drain_s={DRAIN_S:g}", "router.worker_timeout_s=15"),
    )
    ends: dict[str, int | TwophaseError] = {}
    ended_s: list[float] = []

    def ask(name: str, num_tokens: int, begun: threading.Event) -> None:
        num_got = 0
        try:
            with Client(address) as client:
                sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
                for chunk in client.generate((1, 2, 3), sampling):
                    num_got += len(chunk.token_ids)
                    begun.set()
            ends[name] = num_got
        except TwophaseError as error:
            ends[name] = error
        ended_s.append(time.monotonic())

    with _serving("--without-ray", *setup) as (process, address):
        with Client(address) as client:
            started_s = time.monotonic()
            client.generate_once((1, 2, 3), Sampling(max_tokens=200, ignore_eos=True))
            tokens_per_s = 200 / (time.monotonic() - started_s)
        num_short = int(SHORT_S * tokens_per_s)
        begun = [threading.Event(), threading.Event()]
        asking = [
            threading.Thread(target=ask, args=("short", num_short, begun[0])),
            threading.Thread(target=ask, args=("long", 120_000, begun[1])),
        ]
        for thread, event in zip(asking, begun, strict=True):
            thread.start()
            assert event.wait(STOP_S)
        process.send_signal(signal.SIGTERM)
        stopped_s = time.monotonic()
        for thread in asking:
            thread.join(STOP_S)
        code = process.wait(STOP_S)
    assert code == 0
    # The processes' own end is a matter of how busy the machine is; nobody waits for it.
    assert max(ended_s) - stopped_s < GRACE_S
    assert ends["short"] == num_short
    assert isinstance(ends["long"], PeerLost), ends["long"]
    assert "UNAVAILABLE" in str(ends["long"])


@pytest.mark.thorough
@pytest.mark.case("B-156")
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a small /dev/shm of its own needs Linux, root and unshare",
)
def test_with_a_containers_small_shared_memory_all_works_and_the_start_says_so(
    tiny_model_directory: Path,
) -> None:
    command = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        f"exec {sys.executable} -m deploy.cli demo model={tiny_model_directory} "
        "prefill.kv_cache=80MiB decode.kv_cache=80MiB"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "+ 64 tokens" in " ".join(done.stdout.split())
    assert "/dev/shm has 64 MiB free" in done.stderr and "--shm-size=256m" in done.stderr


@pytest.mark.thorough
@pytest.mark.case("B-152")
@pytest.mark.timeout(240)
def test_two_deployments_share_a_host_and_a_port_that_both_want_is_named(
    tiny_model_directory: Path,
) -> None:
    setup = (
        *(f"model={tiny_model_directory}", "prefill.replicas=2", "decode.replicas=2"),
        *("prefill.kv_cache=4MiB", "decode.kv_cache=4MiB", "transfer.backend=torch"),
    )
    beside = (f"model={tiny_model_directory}", "mode=chunked", "decode.kv_cache=4MiB")
    with (
        _serving("--without-ray", *setup) as (_, first),
        _serving("--without-ray", *beside) as (_, second),
    ):
        answers = []
        for address, num_workers in ((first, 4), (second, 1)):
            with Client(address) as client:
                assert len(client.status().workers) == num_workers
                answer = client.generate_once((1, 2, 3), Sampling(max_tokens=5, ignore_eos=True))
                answers.append(answer.token_ids)
        assert answers[0] == answers[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "deploy.cli", "serve", "--without-ray", *setup),
                *(f"router.port={first.rpartition(':')[2]}", "router.http_port=null"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        said = " ".join(done.stderr.split())
        assert f"router.port: {first} cannot be listened at (Address already in use" in said
