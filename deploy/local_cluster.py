"""A whole cluster as child processes of this one, without Ray: for small machines and tests.

The same servers as under Ray (`deploy.cluster`), started as anyone can start them by hand. Each
child writes its log to a file; it ends with this process (Linux: also when this one is killed).
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from core.config import ClusterConfig
from core.errors import ConfigError, PeerLost
from core.process import EXIT_REFUSED

STOP_MARGIN_S = 10.0
PR_SET_PDEATHSIG = 1

Tell = Callable[[str], None]


@dataclass(slots=True)
class Child:
    """One server process; `address` is known once it is up."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    address: str = ""

    def wait_until_up(self) -> None:
        """Read the address that the server prints; raise what it said if it ended instead."""
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if self.address:
            return
        code = self.process.wait()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines[-1].removeprefix("twophase: ") if lines else f"exit code {code}"
        if code == EXIT_REFUSED:
            path, separator, problem = last.partition(": ")
            raise ConfigError(path if separator else self.name, problem or last)
        raise PeerLost(self.name, f"it ended with code {code}: {last}")

    def stop(self, timeout_s: float) -> int:
        """Stop in order, by force after `timeout_s`; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The children of a running cluster; tests signal them by name."""

    address: str
    children: dict[str, Child]
    log_directory: Path


@contextmanager
def local_cluster(
    config: ClusterConfig, *, tell: Tell, log_directory: Path | None = None
) -> Iterator[LocalCluster]:
    """Run a cluster in child processes while the context lasts.

    Raises:
        ConfigError, PeerLost: it cannot start; nothing is left running then.

    Contract: called in a thread that lives as long as the cluster: on Linux the children end
    with the thread that started them.
    """
    with ExitStack() as stack:
        logs = log_directory or Path(stack.enter_context(_temporary_directory()))
        path = logs / "cluster.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        launch = _Launcher(path, logs, config.router.drain_s + STOP_MARGIN_S, stack, tell)
        workers = launch.workers(config)
        addresses = ",".join(child.address for child in workers)
        named = [*config.router.workers, *([addresses] if addresses else [])]
        router = launch.child("router", "router", [f"router.workers=[{','.join(named)}]"])
        router.wait_until_up()
        children = {child.name: child for child in (*workers, router)}
        yield LocalCluster(router.address, children, logs)


@dataclass(frozen=True, slots=True)
class _Launcher:
    config_path: Path
    logs: Path
    stop_timeout_s: float
    stack: ExitStack
    tell: Tell

    def workers(self, config: ClusterConfig) -> list[Child]:
        pool = config.prefill_pool
        named = [("decode", index) for index in range(config.decode.replicas)]
        named += [("prefill", index) for index in range(pool.replicas if pool else 0)]
        children = [
            self.child(f"{role}-{index}", f"{role}_worker", [f"--replica={index}"])
            for role, index in named
        ]
        for number, child in enumerate(children):
            self.tell(f"starting workers: {number} of {len(children)} up")
            child.wait_until_up()
        return children

    def child(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        log = self.logs / f"{name}.log"
        with log.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, f"--config={self.config_path}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # Ctrl-C is for the parent, which stops its children in order. Not a new session:
                # Linux weighs niceness only among threads of one session.
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        child = Child(name, process, log)
        self.stack.callback(self._stop, child)
        return child

    def _stop(self, child: Child) -> None:
        self.tell(f"stopping {child.name}")
        child.stop(self.stop_timeout_s)
        if child.process.stdout is not None:
            child.process.stdout.close()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


@contextmanager
def _temporary_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="twophase-") as directory:
        yield directory
