"""Starts lost workers again.

Each slot of a pool has one worker at a time and one thread that waits for its end. A worker that
ended, for whatever reason, is followed by another in the same slot: same name and address, a new
incarnation. The wait before it doubles from 0.5 s to 30 s while workers of the slot end soon, or
do not start; nothing makes a slot give up, and each loss, failed start and return is a log line.

A worker that does not end, but was given up by the router (silent, or wedged), is killed first;
not at once, because one that was only slow is believed again as soon as it answers.

`close` comes before anything is stopped: no worker is started after it. A slot's thread outlives
its workers, because on Linux a child process ends with the thread that started it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.backoff import Backoff
from core.clock import Clock
from core.config import ClusterConfig
from core.errors import TwophaseError
from core.settings.security import SecurityConfig
from deploy.own_client import own_client
from twophase.client import Client

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
# A worker that was up for this long did not end because of how it was started.
STEADY_S = 30.0
LOOK_S = 1.0
# The router tries to reach a silent worker several times meanwhile.
PATIENCE_S = 5.0
INTRODUCE_S = 5.0
STOP_MARGIN_S = 10.0

_log = logging.getLogger("twophase.deploy")


def stop_timeout_s(config: ClusterConfig) -> float:
    """After how long a server that was told to stop is killed: it drains for a while by itself."""
    return config.router.drain_s + STOP_MARGIN_S


class Replica(Protocol):
    """One start of one server, wherever it runs. `stop` and `kill` are idempotent."""

    def wait_until_up(self) -> str:
        """host:port of the server once it is up; raises what it said if it ended instead."""

    def wait(self) -> str:
        """Block until it has ended; why it did, in words."""

    def stop(self, timeout_s: float) -> None:
        """Stop in order, by force after `timeout_s`; returns when it has ended."""

    def kill(self) -> None:
        """End it at once, and free what belonged to it."""


@dataclass(slots=True)
class Restarts:
    """How long a slot waits before its next start.

    Pure: times in, a duration out.
    """

    _up_s: float | None = None
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_S, MAX_WAIT_S))

    def up(self, now_s: float) -> None:
        """The replica serves."""
        self._up_s = now_s

    @property
    def is_up(self) -> bool:
        """Whether there is a replica that serves, as far as is known."""
        return self._up_s is not None

    def up_for_s(self, now_s: float) -> float:
        """How long the replica has served; 0 while there is none."""
        return 0.0 if self._up_s is None else now_s - self._up_s

    def lost(self, now_s: float) -> float:
        """The replica ended, or did not start; how long to wait before the next."""
        if self.up_for_s(now_s) >= STEADY_S:
            self._backoff.reset()
        self._up_s = None
        return self._backoff.next_s()


class Slot:
    """A place for one server of a name; `create` starts a replica for it."""

    def __init__(self, name: str, create: Callable[[], Replica], clock: Clock) -> None:
        self.name = name
        self.address = ""
        self._create = create
        self._clock = clock
        self._restarts = Restarts()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.replica = create()

    def wait_until_up(self) -> str:
        """host:port of the first replica; raises what it said if it cannot start."""
        self.address = self.replica.wait_until_up()
        self._restarts.up(self._clock.now_s())
        return self.address

    @property
    def is_up(self) -> bool:
        """Whether its replica serves, as far as is known."""
        return self._restarts.is_up

    def keep(self) -> None:
        """From now on start another replica whenever one ends, or does not come up.

        Contract: called once.
        """
        self._thread = threading.Thread(target=self._keep, name=f"keep-{self.name}", daemon=True)
        self._thread.start()

    def replace(self, why: str, age_s: float) -> None:
        """Kill the replica if it was up when it was given up, `age_s` ago; `keep` does the rest."""
        with self._lock:
            if self._restarts.up_for_s(self._clock.now_s()) > age_s >= PATIENCE_S:
                _log.warning("%s is killed: %s", self.name, why)
                self.replica.kill()

    def close(self) -> None:
        """Start no more replicas; idempotent."""
        with self._lock:
            self._is_closed.set()

    def stop(self, timeout_s: float) -> None:
        """Close, and stop the replica in order, by force after `timeout_s`."""
        self.close()
        try:
            if self._restarts.is_up:
                self.replica.stop(timeout_s)
        finally:
            self.kill()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def kill(self) -> None:
        """End the replica at once."""
        self.replica.kill()

    def _keep(self) -> None:
        why = self.replica.wait() if self._restarts.is_up else self._come_up_and_wait()
        while not self._is_closed.is_set():
            with self._lock:
                wait_s = self._restarts.lost(self._clock.now_s())
            _log.warning("%s ended: %s; another is started in %g s", self.name, why, wait_s)
            if not self._is_closed.wait(wait_s):
                why = self._start_and_wait()

    def _start_and_wait(self) -> str:
        """Start a replica and wait for its end; why it ended."""
        try:
            with self._lock:
                if self._is_closed.is_set():
                    return "it is not needed any more"
                self.replica.kill()
                self.replica = self._create()
        except TwophaseError as error:
            return str(error)
        except Exception as error:  # root of the thread: a slot never gives up
            _log.exception("%s could not be started", self.name)
            return repr(error)
        return self._come_up_and_wait()

    def _come_up_and_wait(self) -> str:
        try:
            self.address = self.replica.wait_until_up()
        except TwophaseError as error:
            return str(error)
        except Exception as error:  # as above
            _log.exception("%s could not be started", self.name)
            return repr(error)
        with self._lock:
            self._restarts.up(self._clock.now_s())
        _log.warning("%s is back at %s", self.name, self.address)
        return self.replica.wait()


class Supervisor:
    """Keeps the workers of a cluster; `watch` once the router is up.

    tells_router: whether workers may come up elsewhere than the ones before them, so that the
    router has to be told where they are.
    """

    def __init__(self, slots: Sequence[Slot], *, tells_router: bool = False) -> None:
        self._slots = list(slots)
        self._tells_router = tells_router
        self._told: set[str] = set()
        self._is_closed = threading.Event()
        self._is_watching = False

    def watch(self, router_address: str, security: SecurityConfig) -> None:
        """Start another worker for each that ends, or that the router gives up.

        `security` tells how the router is asked.
        """
        self._is_watching = True
        for slot in self._slots:
            slot.keep()
        looking = threading.Thread(
            target=self._look, args=(router_address, security), name="look", daemon=True
        )
        looking.start()

    def add(self, slot: Slot) -> None:
        """Keep this worker like the others. Contract: called once for a slot, when it is up."""
        self._slots.append(slot)
        if self._is_closed.is_set():
            slot.close()
        elif self._is_watching:
            slot.keep()

    def remove(self, slot: Slot) -> None:
        """Look after this worker no more; idempotent."""
        if slot in self._slots:
            self._slots.remove(slot)

    def close(self) -> None:
        """Start no more workers; idempotent. What runs is stopped by the slots."""
        self._is_closed.set()
        for slot in self._slots:
            slot.close()

    def _look(self, router_address: str, security: SecurityConfig) -> None:
        with own_client(router_address, security) as client:
            while not self._is_closed.wait(LOOK_S):
                try:
                    if self._tells_router:
                        self._introduce(client)
                    stuck_workers = client.status().stuck_workers
                except TwophaseError:
                    continue  # busy, or gone: whoever serves looks after it
                for stuck in stuck_workers:
                    for slot in tuple(self._slots):
                        if slot.address == stuck.address:
                            slot.replace(stuck.why, stuck.age_s)

    def _introduce(self, client: Client) -> None:
        slots = tuple(self._slots)
        for address in self._told - {slot.address for slot in slots}:
            client.admin.remove_worker(address)  # first: its name may be taken again
            self._told.discard(address)
        for slot in slots:
            if slot.is_up and slot.address not in self._told:
                client.admin.add_worker(slot.address, timeout_s=INTRODUCE_S)
                self._told.add(slot.address)


def stop_together(slots: Sequence[Slot], timeout_s: float) -> None:
    """Stop all of them in order, by force after `timeout_s`, or when this is interrupted."""
    for slot in slots:
        slot.close()
    stopping = [threading.Thread(target=slot.stop, args=(timeout_s,)) for slot in slots]
    for thread in stopping:
        thread.start()
    try:
        for thread in stopping:
            thread.join()
    except BaseException:
        for slot in slots:
            slot.kill()
        raise
