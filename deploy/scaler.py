"""Carries out on a running cluster what the autoscaler decides.

    start --> its process or actor starts --> it is up, weights loaded --> the router is told
    drain --> the router gives it nothing new --> it finishes and ends --> the router forgets it

Starts and drains each have a thread of their own, so one that hangs holds up nothing; what they
change is done by the scaler's thread, in turn. A worker counts as serving while the router is
connected to it and has tested its links: one that was lost counts as starting again until its slot
has brought it back. One
that does not come up within `start_timeout_s` is ended, as the autoscaler says.

On Linux a child process ends with the thread that started it, so the scaler's thread outlives its
workers: it ends when `may_end` is set, after they were stopped.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from core.clock import Clock, MonotonicClock
from core.errors import InvalidRequest, TwophaseError
from core.listing import WorkerState
from core.request import WorkerName
from core.settings.scaling import ScalingConfig
from core.worker import Role, WorkerStatus
from deploy.autoscaler.autoscaler import tick
from deploy.autoscaler.facts import ClusterFacts, Life, Load, WorkerFacts
from deploy.autoscaler.history import State
from deploy.autoscaler.record import ChangeRole, Drain, GiveUp, Record, Start
from deploy.decision_log import Entry, append
from deploy.live_config import LiveConfig
from deploy.own_client import own_client
from deploy.supervisor import Slot, Supervisor, stop_timeout_s
from twophase.client import Client

# Makes a worker of this role and number start, where another listened if an address is given.
Create = Callable[[Role, int, str | None], Slot]

_log = logging.getLogger("twophase.deploy")


@dataclass(slots=True)
class _Member:
    slot: Slot
    role: Role
    since_s: float
    is_connected: bool = False
    is_draining: bool = False
    becomes: Role | None = None
    heard_s: float | None = None
    load: Load = Load()


class Scaler:
    """Keeps the pools of one cluster at the sizes that are decided; `slots` is kept up to date.

    Invariant: members, slots and state change in the scaler's thread alone.
    """

    def __init__(
        self,
        live: LiveConfig,
        slots: list[Slot],
        create: Create,
        supervisor: Supervisor,
        may_end: threading.Event,
        clock: Clock = MonotonicClock(),
    ) -> None:
        self._live = live
        self._security = live.current.security
        self._stop_s = stop_timeout_s(live.current)
        self._slots = slots
        self._create = create
        self._supervisor = supervisor
        self._may_end = may_end
        self._clock = clock
        self._state = State()
        self._free_addresses: list[str] = []
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._is_closed = threading.Event()
        self._acting = threading.Lock()
        now_s = clock.now_s()
        self._members = {
            WorkerName(slot.name): _Member(slot, _role_of(slot.name), now_s) for slot in slots
        }
        # Of those that were found some may have left before: their numbers stay free.
        self._next_index = dict.fromkeys(Role, 0)
        for name, member in self._members.items():
            index = int(name.rpartition("-")[2]) + 1
            self._next_index[member.role] = max(self._next_index[member.role], index)

    def watch(self, router_address: str) -> None:
        """Decide every `interval_s` from now on. Contract: called once."""
        thread = threading.Thread(
            target=self._run, args=(router_address,), name="scale", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Decide nothing more; what starts is stopped with the other slots.

        Contract: idempotent; may block for a decision that is being carried out. No slot is added
        after it.
        """
        self._is_closed.set()
        with self._acting:
            pass
        self._jobs.put(lambda: None)

    def _run(self, router_address: str) -> None:
        with own_client(router_address, self._security) as client:
            next_s = self._clock.now_s()
            while not self._is_closed.is_set():
                try:
                    if not self.take_turn(max(next_s - self._clock.now_s(), 0.0)):
                        next_s = self._clock.now_s() + self._scaling().interval_s
                        self._unless_closed(lambda: self.look(client))
                except Exception:  # root of the thread: the next decision may do better
                    _log.exception("a decision was not carried out")
            self._may_end.wait()

    def take_turn(self, timeout_s: float) -> bool:
        """Take note of one start or drain that ended; False if none did in `timeout_s`."""
        try:
            job = self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._unless_closed(job)
        return True

    def _unless_closed(self, act: Callable[[], object]) -> None:
        with self._acting:
            if not self._is_closed.is_set():
                act()

    def look(self, client: Client) -> Record | None:
        """One decision, carried out; None where the router does not answer."""
        now_s, scaling = self._clock.now_s(), self._scaling()
        while not self._live.news.empty():
            reload = self._live.news.get()
            _log.info("%s", reload.sentence)
            _write(reload.to_json(now_s), scaling)
        try:
            status, listed = client.status(), client.admin.workers()
        except TwophaseError as error:
            _log.warning("no decision: %s", error)
            return None
        ready = [worker for worker in listed if worker.state is not WorkerState.WARMING]
        num_slots = {worker.name: worker.max_num_sequences for worker in ready}
        told = {worker.name: worker for worker in status.workers}
        for name, member in self._members.items():
            _update(member, told.get(name), num_slots.get(name), now_s)
        facts = ClusterFacts(
            tuple(_facts(name, member) for name, member in self._members.items()), status.demand
        )
        record, self._state = tick(scaling, facts, now_s, self._state)
        if record.is_change:
            _log.info("%s", record.sentence)
            _tell(record, client)
        _write(record.to_json(), scaling)
        if not record.is_dry_run:
            self._carry_out(record, client)
        return record

    def _scaling(self) -> ScalingConfig:
        """The section in force now; a reload takes none away."""
        scaling = self._live.current.scaling
        assert scaling is not None
        return scaling

    def _carry_out(self, record: Record, client: Client) -> None:
        for action in record.actions:
            match action:
                case Start(role, num_workers):
                    for _ in range(num_workers):
                        self._start(role, client)
                case Drain(names):
                    for name in names:
                        self._drain(name, None, client)
                case ChangeRole(names, to):
                    for name in names:
                        self._drain(name, to, client)
                case GiveUp(names):
                    for name in names:
                        self._give_up(name, client)

    def _start(self, role: Role, client: Client) -> None:
        address = self._free_addresses.pop() if self._free_addresses else None
        slot = self._create(role, self._next_index[role], address)
        self._next_index[role] += 1
        member = self._members[WorkerName(slot.name)] = _Member(slot, role, self._clock.now_s())
        self._slots.append(slot)

        def introduce() -> None:
            try:
                client.admin.add_worker(slot.wait_until_up())
            except TwophaseError as error:  # it stays, not serving, until it is given up
                if self._is_wanted(member) and not self._is_closed.is_set():
                    _log.warning("%s did not start: %s", slot.name, error)
                return
            self._jobs.put(lambda: self._keep(member))

        threading.Thread(target=introduce, name=f"start-{slot.name}", daemon=True).start()

    def _keep(self, member: _Member) -> None:
        if self._is_wanted(member):
            self._supervisor.add(member.slot)

    def _is_wanted(self, member: _Member) -> bool:
        """Whether it is to serve: nobody has drained it or given it up."""
        return not member.is_draining and self._members.get(WorkerName(member.slot.name)) is member

    def _drain(self, name: WorkerName, becomes: Role | None, client: Client) -> None:
        member = self._members[name]
        member.is_draining, member.becomes = True, becomes
        member.slot.close()

        def leave() -> None:
            try:
                client.admin.drain(name)
            except InvalidRequest:
                pass  # the router never met it, or lost it
            except TwophaseError as error:
                _log.warning("the router was not told that %s leaves: %s", name, error)
            try:
                member.slot.stop(self._stop_s)
                _tell_that_it_left(client, member.slot)
            finally:
                self._jobs.put(lambda: self._left(name, client))

        threading.Thread(target=leave, name=f"drain-{name}", daemon=True).start()

    def _give_up(self, name: WorkerName, client: Client) -> None:
        slot = self._forget(name).slot

        def end() -> None:
            slot.stop(0.0)
            if slot.address:  # it served once, and the router would look for it for ever
                _tell_that_it_left(client, slot)

        threading.Thread(target=end, name=f"give-up-{name}", daemon=True).start()

    def _left(self, name: WorkerName, client: Client) -> None:
        member = self._forget(name)
        self._free_addresses.append(member.slot.address)
        if member.becomes is not None and not self._is_closed.is_set():
            self._start(member.becomes, client)

    def _forget(self, name: WorkerName) -> _Member:
        member = self._members.pop(name)
        self._slots.remove(member.slot)
        self._supervisor.remove(member.slot)
        return member


def _write(entry: Entry, scaling: ScalingConfig) -> None:
    if scaling.log is None:
        return
    try:
        append(scaling.log, entry, scaling.log_size)
    except OSError as error:  # what is decided matters more than that it is written down
        _log.warning("a decision is not in the log: %s", error)


def _tell(record: Record, client: Client) -> None:
    try:
        client.admin.note_scaling(record.sentence)
    except TwophaseError as error:
        _log.warning("the router's page does not show a decision: %s", error)


def _tell_that_it_left(client: Client, slot: Slot) -> None:
    try:
        client.admin.remove_worker(slot.address)
    except TwophaseError as error:
        _log.warning("the router still looks for %s: %s", slot.name, error)


def _role_of(name: str) -> Role:
    return Role(name.rpartition("-")[0])


def _update(
    member: _Member, told: WorkerStatus | None, num_slots: int | None, now_s: float
) -> None:
    """What the router sees of a worker; num_slots is None where it does not serve."""
    if member.is_connected != (num_slots is not None):
        member.is_connected = num_slots is not None
        member.since_s = now_s
    if num_slots is None:
        member.heard_s = None
    elif told is not None:
        member.heard_s = now_s
        member.load = Load(
            num_waiting=told.num_waiting_requests,
            num_queued_tokens=told.num_waiting_prompt_tokens,
            num_running=told.num_running_requests,
            num_slots=num_slots,
            num_reservations=told.num_reservations,
            kv_use=told.num_used_blocks / max(told.num_total_blocks, 1),
            signals=told.signals,
        )


def _facts(name: WorkerName, member: _Member) -> WorkerFacts:
    life = Life.SERVING if member.is_connected else Life.STARTING
    return WorkerFacts(
        name=name,
        role=member.role,
        life=Life.DRAINING if member.is_draining else life,
        since_s=member.since_s,
        heard_s=member.heard_s,
        load=member.load,
        becomes=member.becomes,
    )
