"""What is decided is carried out: starts side by side, drains before ends, roles change."""

import json
import queue
import threading
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from core.clock import ManualClock
from core.config import load_config
from core.errors import PeerLost
from core.listing import WorkerState
from core.settings.scaling import DecodeScaling, PoolScaling, ScalingConfig
from core.signals import Demand, Signals
from core.worker import Role
from deploy.autoscaler.record import ChangeRole, Drain, GiveUp, Start
from deploy.autoscaler.wish import Rule
from deploy.cli import app
from deploy.live_config import LiveConfig
from deploy.scaler import Scaler
from deploy.supervisor import Slot, Supervisor
from tests.unit.deploy.scaling_facts import after, demand_of

LATE_S = 10.0


class FakeReplica:
    """Up when the test says so; ends when it is stopped."""

    def __init__(self, name):
        self.name = name
        self.calls = []
        self.up = queue.Queue()
        self.ended = threading.Event()

    def wait_until_up(self):
        try:
            said = self.up.get(timeout=LATE_S)
        except queue.Empty:  # its test is over, and nobody cares any more
            raise PeerLost(self.name, "it never came up") from None
        if isinstance(said, Exception):
            raise said
        return said

    def wait(self):
        assert self.ended.wait(LATE_S)
        return "it was stopped"

    def stop(self, timeout_s):
        self.calls.append("stop")
        self.ended.set()

    def kill(self):
        self.calls.append("kill")
        self.up.put(PeerLost(self.name, "killed"))
        self.ended.set()


class FakeRouter:
    """A client of a router that the test plays."""

    def __init__(self):
        self.connected = {}
        self.cold = set()
        self.demand = Demand()
        self.said = queue.Queue()
        self.noted = []
        self.admin = self

    def add_worker(self, address):
        self.said.put(("add", address))

    def remove_worker(self, address):
        self.said.put(("remove", address))

    def drain(self, name):
        self.said.put(("drain", name))

    def note_scaling(self, sentence):
        self.noted.append(sentence)

    def workers(self):
        return [
            SimpleNamespace(
                name=name,
                max_num_sequences=16,
                state=WorkerState.WARMING if name in self.cold else WorkerState.READY,
            )
            for name in self.connected
        ]

    def status(self):
        return SimpleNamespace(workers=list(self.connected.values()), demand=self.demand)


def told(name, *, num_running=0):
    return SimpleNamespace(
        name=name,
        num_waiting_requests=0,
        num_waiting_prompt_tokens=0,
        num_running_requests=num_running,
        num_reservations=num_running,
        num_used_blocks=0,
        num_total_blocks=100,
        signals=Signals(tokens_per_s=1000.0 if name.startswith("p") else None, step_s=0.03),
    )


class World:
    """A scaler with slots of fake replicas."""

    def __init__(self, *names, **scaling):
        given = {
            "prefill": PoolScaling(max_replicas=4),
            "decode": DecodeScaling(max_replicas=4),
            "grow_after_s": 0.0,
            "shrink_after_s": 10.0,
            "cooldown_s": 0.0,
            "start_timeout_s": 60.0,
        }
        config = load_config().model_copy(update={"scaling": ScalingConfig(**(given | scaling))})
        self.clock = ManualClock(1000.0)
        self.router = FakeRouter()
        self.replicas = {}
        self.slots = [self.slot(name) for name in names]
        for name in names:
            self.come_up(name)
            next(slot for slot in self.slots if slot.name == name).wait_until_up()
        self.supervisor = Supervisor(self.slots)
        self.live = LiveConfig(config)
        self.scaler = Scaler(
            self.live, self.slots, self.create, self.supervisor, threading.Event(), self.clock
        )

    def slot(self, name):
        replica = self.replicas[name] = FakeReplica(name)
        return Slot(name, lambda: replica, self.clock)

    def create(self, role, index, address):
        return self.slot(f"{role.value}-{index}")

    def come_up(self, name):
        """Its process serves, and the router is connected to it."""
        self.replicas[name].up.put(f"{name}:1")
        self.router.connected[name] = told(name)

    def look(self, seconds=5.0):
        record = self.scaler.look(self.router)
        self.clock.advance(seconds)
        return record

    def turn(self):
        assert self.scaler.take_turn(LATE_S)

    def hear(self):
        return self.router.said.get(timeout=LATE_S)

    @property
    def names(self):
        return [slot.name for slot in self.slots]


BUSY = demand_of(requests_per_s=5.0, prompt=500.0, decode_s=0.2)


def test_workers_start_side_by_side_and_serve_once_the_router_is_connected():
    world = World("prefill-0", "decode-0")
    world.router.demand = BUSY
    record = world.look()
    assert record.actions == (Start(Role.PREFILL, 3),)
    assert world.names[2:] == ["prefill-1", "prefill-2", "prefill-3"]
    world.come_up("prefill-2")  # the second is the first to be there
    assert world.hear() == ("add", "prefill-2:1")
    world.turn()
    pool = after(world.look(), Role.PREFILL)
    assert (pool.view.num_serving, pool.view.num_starting) == (2, 2)
    assert pool.after == 4


def test_a_worker_counts_as_starting_until_its_links_are_tested():
    world = World("prefill-0", "decode-0")
    world.look()
    world.router.cold.add("decode-0")
    pool = after(world.look(), Role.DECODE)
    assert (pool.view.num_serving, pool.view.num_starting) == (0, 1)
    world.router.cold.clear()
    assert after(world.look(), Role.DECODE).view.num_serving == 1


def test_a_worker_that_hangs_is_ended_after_its_time_and_holds_up_nothing():
    world = World("prefill-0", "decode-0")
    world.router.demand = BUSY
    world.look(seconds=61.0)
    record = world.look()
    assert record.actions[0] == GiveUp(("prefill-1", "prefill-2", "prefill-3"))
    assert "kill" in world.replicas["prefill-1"].calls
    assert world.names == ["prefill-0", "decode-0"]
    assert after(world.look(), Role.PREFILL).rule is Rule.START_FAILED


@pytest.mark.case("B-138")
def test_a_worker_that_leaves_is_told_to_the_router_first_and_forgotten_last():
    world = World("prefill-0", "decode-0", "decode-1")
    for _ in range(4):
        record = world.look()
        if record.actions:
            break
    assert record.actions == (Drain(("decode-0",)),)
    assert world.hear() == ("drain", "decode-0")
    assert world.hear() == ("remove", "decode-0:1")
    assert "stop" in world.replicas["decode-0"].calls
    assert "decode-0" in world.names  # until its end was noted
    world.turn()
    assert world.names == ["prefill-0", "decode-1"]


def test_a_drained_worker_starts_again_in_the_other_pool():
    world = World("prefill-0", "prefill-1", "decode-0", "decode-1", budget=4.0)
    world.router.demand = demand_of(requests_per_s=1.0, prompt=100.0, decode_s=60.0)
    record = world.look()
    assert record.actions == (ChangeRole(("prefill-0",), Role.DECODE),)
    assert after(world.look(), Role.DECODE).before == 3  # it is on its way
    assert [world.hear()[0], world.hear()[0]] == ["drain", "remove"]
    world.turn()
    assert world.names == ["prefill-1", "decode-0", "decode-1", "decode-2"]


def test_names_of_workers_that_were_found_are_not_given_again():
    world = World("prefill-3", "decode-0")  # 0 to 2 left while another controller was there
    world.router.demand = BUSY
    world.look()
    assert world.names[2:] == ["prefill-4", "prefill-5", "prefill-6"]


@pytest.mark.case("B-142")
def test_a_worker_that_was_lost_counts_as_starting_until_it_is_back():
    world = World("prefill-0", "decode-0")
    world.look()
    lost = world.router.connected.pop("decode-0")
    pool = after(world.look(), Role.DECODE)
    assert (pool.view.num_serving, pool.view.num_starting) == (0, 1)
    world.router.connected["decode-0"] = lost
    assert after(world.look(), Role.DECODE).view.num_serving == 1


def test_a_dry_run_decides_and_changes_nothing(tmp_path):
    log = tmp_path / "decisions.jsonl"
    world = World("prefill-0", "decode-0", dry_run=True, log=log)
    world.router.demand = BUSY
    record = world.look()
    assert record.actions
    assert world.names == ["prefill-0", "decode-0"]
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["sentence"] == record.sentence
    shown = CliRunner().invoke(app, ["scaling", "log", str(log)])
    assert "prefill 1 -> 4 (ahead)" in shown.output
    assert "nothing is changed" in shown.output
    explained = CliRunner().invoke(app, ["scaling", "explain", str(log), "1"])
    assert "requests_per_s: 5.0" in explained.output
    assert CliRunner().invoke(app, ["scaling", "explain", str(log), "2"]).exit_code != 0


def test_the_router_is_told_in_words_of_what_changes_something_and_nothing_hangs_on_it():
    world = World("prefill-0", "decode-0")
    world.look()
    assert world.router.noted == []
    world.router.demand = BUSY
    record = world.look()
    assert world.router.noted == [record.sentence]

    def fail(sentence):
        raise PeerLost("router", "it does not answer")

    deaf = World("prefill-0", "decode-0")
    deaf.router.demand, deaf.router.note_scaling = BUSY, fail
    assert deaf.look().actions == record.actions
    assert len(deaf.names) == len(world.names) > 2


def test_without_an_answer_of_the_router_nothing_is_decided():
    world = World("prefill-0", "decode-0")

    def fail():
        raise PeerLost("router", "it is gone")

    world.router.status = fail
    assert world.scaler.look(world.router) is None


def test_a_closed_scaler_starts_nobody_any_more():
    world = World("prefill-0", "prefill-1", "decode-0", "decode-1", budget=4.0)
    world.router.demand = demand_of(requests_per_s=1.0, prompt=100.0, decode_s=60.0)
    world.look()
    world.scaler.close()
    assert [world.hear()[0], world.hear()[0]] == ["drain", "remove"]
    world.turn()
    world.turn()  # what close said, and that the worker has left
    assert world.names == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
