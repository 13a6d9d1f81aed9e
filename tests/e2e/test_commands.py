"""The command line as people use it: serve, ask, status, Ctrl-C, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.segments import assert_no_orphans, segments
from twophase.client import Client

START_S = 90.0
STOP_S = 60.0
# What does not stop in order is killed after drain_s and a margin: 40 s.
FORCED_STOP_S = 35.0


@contextmanager
def _serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`twophase serve ...` and the address that it says is ready."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "deploy.cli", "serve", *arguments),
            *("router.port=0", "router.http_port=0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"gRPC at (\S+:\d+), HTTP at http://\S+:\d+, mode", ready)
        assert found, (ready, process.stderr.read() if process.stderr else "")
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _twophase(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )
    return " ".join(result.stdout.split())


def _kill_and_wait_for_another(worker: str, address: str) -> None:
    """Kill a worker; returns once another process serves in its place."""
    with Client(address) as client:
        pid = next(status.pid for status in client.status().workers if status.name == worker)
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            status = client.status()
            pids = [other.pid for other in status.workers if other.name == worker]
            if status.is_ready and pids not in ([], [pid]):
                return
            time.sleep(0.1)
    raise AssertionError(f"{worker} was not replaced within {START_S:g} s")


def _left_of(processes: list[psutil.Process]) -> list[str]:
    """Command lines of processes that outlive a stop by five seconds."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    return [" ".join(process.cmdline()[:4]) for process in alive]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("launcher", [(), ("--without-ray",)], ids=["ray", "processes"])
def test_serve_answers_shows_its_state_and_leaves_nothing_after_ctrl_c(
    tiny_model_directory: Path, launcher: tuple[str, ...]
) -> None:
    known = segments()
    setup = (f"model={tiny_model_directory}", "prefill.kv_cache=2MiB", "decode.kv_cache=2MiB")
    with _serving(*launcher, *setup) as (process, address):
        answer = _twophase("ask", "Hello", "--address", address, "--max-tokens", "5")
        status = _twophase("status", "--address", address)
        doctor = _twophase("doctor", "--address", address)
        _kill_and_wait_for_another("decode-0", address)
        second_answer = _twophase("ask", "Hello", "--address", address, "--max-tokens", "5")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        code = process.wait(STOP_S)

    assert "+ 5 tokens" in answer and "+ 5 tokens" in second_answer
    assert "of KV over shm, prefill-0 to decode-0" in answer
    assert "prefill-0" in status and "decode-0" in status and "ready" in status
    assert "both caches lie in the memory of one host" in status
    assert "2 sealed, 0 failed" in status or "1 sealed, 0 failed" in status
    assert "0 blocks in use, 0 in quarantine, 0 orphans" in doctor
    assert code == 0
    assert time.monotonic() - started_s < FORCED_STOP_S
    assert len(children) >= 3
    assert _left_of(children) == []
    assert_no_orphans(known)


def _next_line(process: subprocess.Popen[str], text: str) -> str:
    """The next line on standard output that holds `text`."""
    assert process.stdout is not None
    return next(line for line in process.stdout if text in line)


@pytest.mark.timeout(120)
def test_a_hangup_reloads_the_file_and_ctrl_c_lets_a_running_stream_end(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "cluster.yaml", tmp_path / "decisions.jsonl"
    scaled = f"""
model: {tiny_model_directory}
prefill: {{kv_cache: 8MiB}}
decode: {{kv_cache: 8MiB}}
scaling: {{prefill: {{max_replicas: 1}}, decode: {{max_replicas: 1}}, interval_s: 0.2, log: {log}}}
"""
    path.write_text(scaled)
    with _serving("--without-ray", "--dry-run", str(path)) as (process, address):
        path.write_text(scaled.replace("8MiB", "9MiB"))
        process.send_signal(signal.SIGHUP)
        refused = _next_line(process, "configuration")
        path.write_text(f"{scaled}router: {{max_attempts: 1, max_queued_requests: 0}}")
        process.send_signal(signal.SIGHUP)
        taken = _next_line(process, "configuration")
        asking = subprocess.Popen(
            [
                *(sys.executable, "-m", "deploy.cli", "ask", "Hello", "--raw"),
                *("--address", address, "--max-tokens", "600"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert asking.stdout is not None
        assert asking.stdout.read(1)
        with Client(address) as client:
            url = f"http://{client.status().http_address}/v1/completions"
        body = {"prompt": [5], "max_tokens": 600, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", url, json=body, timeout=STOP_S) as events:
            lines = events.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        answer, _ = asking.communicate(timeout=STOP_S)
        code = process.wait(STOP_S)

    assert "prefill.kv_cache 8388608 -> 9437184" in refused
    assert "router.max_attempts 4 -> 1; router.max_queued_requests 1024 -> 0" in taken
    told = _twophase("scaling", "log", "--all", str(log))
    assert "(dry run: nothing is changed)" in told
    assert " ".join(refused.split()) in told and " ".join(taken.split()) in told
    assert last == "data: [DONE]"
    assert asking.returncode == 0
    assert "tokens" in answer
    assert code == 0


@pytest.mark.timeout(120)
def test_demo_shows_an_answer_and_its_phases(tiny_model_directory: Path) -> None:
    output = _twophase("demo", "--without-ray", f"model={tiny_model_directory}")

    assert "asking" in output
    assert "prefill" in output and "decode" in output
    assert "of KV over shm, prefill-0 to decode-0" in output
