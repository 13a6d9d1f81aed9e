"""A whole cluster as child processes of this one, without Ray: for small machines and tests.

The same servers as under Ray (`deploy.cluster`), started as anyone can start them by hand. Each
child writes its log to a file; it ends with this process (Linux: also when this one is killed).
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from core.clock import MonotonicClock
from core.config import ClusterConfig
from core.errors import ConfigError, PeerLost
from core.process import EXIT_REFUSED
from core.settings.chaos import ChaosConfig
from core.worker import Role
from deploy.live_config import LiveConfig
from deploy.ports import require_free, reserved_address
from deploy.scaler import Scaler
from deploy.supervisor import Slot, Supervisor, stop_timeout_s, stop_together

START_TIMEOUT_S = 600.0

Tell = Callable[[str], None]


class Child:
    """One server process; its last line on standard error is kept for who asks why it ended."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        clock_ahead_s: int = 0,
    ) -> None:
        """Start it; its monotonic clock is `clock_ahead_s` ahead of the machine's."""
        self.name = name
        self.address = ""
        self.log = log
        command = [sys.executable, "-m", "deploy.child", str(os.getpid()), module, *arguments]
        if clock_ahead_s:
            command = ["unshare", "--time", f"--monotonic={clock_ahead_s}", *command]
        with log.open("a", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # Ctrl-C is for the parent, which stops its children in order. Not a new session:
                # Linux weighs niceness only among threads of one session.
                process_group=0,
            )

    def wait_until_up(self) -> str:
        """Read the address that the server prints; raise what it said if it ended instead.

        One that is not up after START_TIMEOUT_S is ended.
        """
        assert self.process.stdout is not None
        late = threading.Timer(START_TIMEOUT_S, self.process.kill)
        late.start()
        self.address = self.process.stdout.readline().strip()
        late.cancel()
        if self.address:
            return self.address
        code = self.process.wait()
        if code == EXIT_REFUSED:
            last = self._last_line()
            path, separator, problem = last.partition(": ")
            raise ConfigError(path if separator else self.name, problem or last)
        raise PeerLost(self.name, self.wait())

    def wait(self) -> str:
        """Block until it has ended; why it did."""
        code = self.process.wait()
        if code == 0:
            return "it was stopped"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        return f"it ended with code {code}: {self._last_line()}"

    def stop(self, timeout_s: float) -> None:
        """Stop in order, by force after `timeout_s`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _last_line(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        # The report of several errors at once is drawn in a box.
        lines = [line for raw in text.splitlines() if (line := raw.strip(" |+-"))]
        return lines[-1].removeprefix("twophase: ") if lines else "it said nothing"


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster."""

    addresses: tuple[str, ...]
    slots: tuple[Slot, ...]
    log_directory: Path

    @property
    def address(self) -> str:
        """The router's; of several, the first one's."""
        return self.addresses[0]

    @property
    def children(self) -> dict[str, Child]:
        """Who is in each slot now, by name; tests signal them."""
        replicas = {slot.name: slot.replica for slot in self.slots}
        return {name: child for name, child in replicas.items() if isinstance(child, Child)}


@contextmanager
def local_cluster(
    config: ClusterConfig,
    *,
    tell: Tell,
    log_directory: Path | None = None,
    replace_lost: bool = False,
    num_routers: int = 1,
    live: LiveConfig | None = None,
) -> Iterator[LocalCluster]:
    """Run a cluster in child processes while the context lasts.

    Args:
        config: the cluster.
        tell: called with a line about each step of the start and the stop.
        log_directory: where each server writes its log; None is a directory that goes away.
        live: the same configuration, for who changes it while the cluster runs.
        replace_lost: whether a worker that ends is followed by another.
        num_routers: several listen on ports of their own, and are then replaced like workers.

    Raises:
        ConfigError, PeerLost: it cannot start; nothing is left running then.

    Contract: called in a thread that lives as long as the cluster: on Linux the children end
    with the thread that started them.
    """
    require_free(config.router)
    with ExitStack() as stack:
        logs = log_directory or Path(stack.enter_context(_temporary_directory()))
        path = logs / "cluster.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        launch = _Launcher(path, logs, stack, tell, stop_timeout_s(config), config.chaos)
        may_end = threading.Event()
        stack.callback(may_end.set)
        workers = launch.workers(config)
        addresses = ",".join(slot.address for slot in workers)
        named = [*config.router.workers, *([addresses] if addresses else [])]
        routers = launch.routers(named, num_routers)
        router = routers[0]
        supervisor = Supervisor(workers if num_routers == 1 else [*workers, *routers])
        stack.callback(supervisor.close)  # before anything is stopped
        if replace_lost:
            supervisor.watch(router.address, config.security)
        if config.scaling is not None:
            scaler = Scaler(live or LiveConfig(config), workers, launch.worker, supervisor, may_end)
            stack.callback(scaler.close)
            scaler.watch(router.address)
        yield LocalCluster(tuple(router.address for router in routers), (*workers, *routers), logs)


@dataclass(frozen=True, slots=True)
class _Launcher:
    config_path: Path
    logs: Path
    stack: ExitStack
    tell: Tell
    stop_timeout_s: float
    chaos: ChaosConfig

    def workers(self, config: ClusterConfig) -> list[Slot]:
        pool = config.prefill_pool
        named = [(Role.DECODE, index) for index in range(config.decode.replicas)]
        named += [(Role.PREFILL, index) for index in range(pool.replicas if pool else 0)]
        slots: list[Slot] = []
        self.stack.callback(self._stop, "workers", slots)
        for role, index in named:
            slots.append(self.worker(role, index))
        for number, slot in enumerate(slots):
            self.tell(f"starting workers: {number} of {len(slots)} up")
            slot.wait_until_up()
        return slots

    def worker(self, role: Role, index: int, address: str | None = None) -> Slot:
        words = [f"--replica={index}", f"--listen={address or reserved_address(self.stack)}"]
        return self._slot(f"{role.value}-{index}", f"{role.value}_worker", words)

    def routers(self, worker_addresses: Sequence[str], num_routers: int) -> list[Slot]:
        named = f"router.workers=[{','.join(worker_addresses)}]"
        slots: list[Slot] = []
        self.stack.callback(self._stop, "the router" if num_routers == 1 else "routers", slots)
        for number in range(num_routers):
            words = [named]
            if num_routers > 1:
                host, _, port = reserved_address(self.stack).rpartition(":")
                words += [f"router.host={host}", f"router.port={port}", "router.http_port=null"]
            slots.append(self._slot(f"router-{number}" if number else "router", "router", words))
        for slot in slots:
            slot.wait_until_up()
        return slots

    def _slot(self, name: str, module: str, arguments: Sequence[str]) -> Slot:
        words = [f"--config={self.config_path}", *arguments]
        log, ahead_s = self.logs / f"{name}.log", self._clock_ahead_s(name)
        return Slot(
            name, lambda: Child(name, module, words, log, clock_ahead_s=ahead_s), MonotonicClock()
        )

    def _clock_ahead_s(self, name: str) -> int:
        return random.Random(f"{self.chaos.seed} {name}").randint(0, self.chaos.clock_skew_s)

    def _stop(self, what: str, slots: Sequence[Slot]) -> None:
        self.tell(f"stopping {what}")
        stop_together(slots, self.stop_timeout_s)


@contextmanager
def _temporary_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="twophase-") as directory:
        yield directory
