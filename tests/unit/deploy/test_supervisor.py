"""A slot has one replica at a time, another after each end, and none after it was closed."""

import queue
import threading

import pytest

from core.clock import ManualClock
from core.errors import ConfigError, PeerLost
from deploy import supervisor as supervisor_module
from deploy.supervisor import MAX_WAIT_S, PATIENCE_S, STEADY_S, Restarts, Slot, stop_together

LATE_S = 10.0


class FakeReplica:
    """A server that is up, refused or gone when the test says so."""

    def __init__(self, number):
        self.number = number
        self.up = queue.Queue()
        self.ended = threading.Event()
        self.why = ""
        self.calls = []

    def wait_until_up(self):
        said = self.up.get(timeout=LATE_S)
        if isinstance(said, Exception):
            raise said
        return said

    def wait(self):
        assert self.ended.wait(LATE_S)
        return self.why

    def end(self, why="it was ended by SIGKILL"):
        self.why = why
        self.up.put(PeerLost("decode-0", why))
        self.ended.set()

    def stop(self, timeout_s):
        self.calls.append("stop")
        self.end("it was stopped")

    def kill(self):
        self.calls.append("kill")
        self.end("it was killed")


class Place:
    """A slot whose replicas the test plays; waits take no time."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(supervisor_module, "FIRST_WAIT_S", 0.0)
        self.clock = ManualClock(1000.0)
        self.created = queue.Queue()
        self.num_created = 0
        self.slot = Slot("decode-0", self.create, self.clock)
        self.first = self.next()
        self.first.up.put("a:1")
        self.slot.wait_until_up()
        self.clock.advance(100.0)

    def create(self):
        replica = FakeReplica(self.num_created)
        self.num_created += 1
        self.created.put(replica)
        return replica

    def next(self):
        return self.created.get(timeout=LATE_S)


@pytest.fixture
def place(monkeypatch):
    place = Place(monkeypatch)
    yield place
    place.slot.stop(LATE_S)


class TestRestarts:
    def test_waits_grow_while_replicas_do_not_stay(self):
        restarts, now_s, waits = Restarts(), 0.0, []
        for _ in range(9):
            waits.append(restarts.lost(now_s))
            now_s += waits[-1]
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
        assert MAX_WAIT_S == 30.0

    def test_one_that_was_up_for_long_begins_anew(self):
        restarts = Restarts()
        restarts.lost(0.0), restarts.lost(1.0)
        restarts.up(2.0)
        assert restarts.lost(2.0 + STEADY_S) == 0.5

    def test_one_that_was_up_for_a_moment_does_not(self):
        restarts = Restarts()
        restarts.lost(0.0), restarts.lost(1.0)
        restarts.up(2.0)
        assert restarts.lost(2.0 + STEADY_S - 1.0) == 2.0


class TestASlot:
    def test_is_taken_by_another_after_each_end(self, place):
        place.slot.keep()
        replica = place.first
        for number in range(1, 4):
            replica.end()
            replica = place.next()
            replica.up.put("a:1")
            assert replica.number == number
        assert place.slot.replica is replica

    def test_frees_what_the_last_one_left_before_the_next(self, place):
        place.slot.keep()
        place.first.end()
        place.next()
        assert place.first.calls == ["kill"]

    def test_never_gives_up_on_starts_that_fail(self, place, caplog):
        place.slot.keep()
        place.first.end()
        errors = [
            ConfigError("listen", "in use"),
            PeerLost("decode-0", "odd"),
            OSError("no memory"),
        ]
        for error in errors:
            place.next().up.put(error)
        last = place.next()
        last.up.put("a:1")
        assert place.slot.replica is last
        for error in errors:
            assert str(error) in caplog.text

    def test_says_what_was_lost_and_that_it_is_back(self, place, caplog):
        place.slot.keep()
        place.first.end("it was ended by SIGKILL")
        second = place.next()
        second.up.put("a:1")
        second.end()
        place.next()
        assert caplog.messages[:2] == [
            "decode-0 ended: it was ended by SIGKILL; another is started in 0 s",
            "decode-0 is back at a:1",
        ]


class TestAStuckReplica:
    def test_is_killed_and_followed(self, place):
        place.slot.keep()
        place.slot.replace("wedged", PATIENCE_S)
        assert "kill" in place.first.calls
        assert place.next().number == 1

    def test_is_given_time_to_answer_again(self, place):
        place.slot.keep()
        place.slot.replace("it has said nothing for 15 s", PATIENCE_S - 0.1)
        assert place.first.calls == []

    def test_is_not_the_one_that_came_after_it(self, place):
        place.slot.keep()
        place.first.end()
        second = place.next()
        second.up.put("a:1")
        place.slot.replace("wedged", PATIENCE_S)
        assert second.calls == []


class TestStopping:
    def test_stops_in_order_and_starts_nothing(self, place):
        place.slot.keep()
        place.slot.stop(LATE_S)
        assert place.first.calls == ["stop", "kill"]
        assert place.num_created == 1

    def test_ends_one_that_is_still_starting(self, place):
        place.slot.keep()
        place.first.end()
        second = place.next()
        place.slot.stop(LATE_S)
        assert second.calls == ["kill"]
        assert place.num_created == 2

    def test_ends_the_wait_for_the_next_start(self, place, monkeypatch):
        monkeypatch.setattr(supervisor_module, "FIRST_WAIT_S", 3600.0)
        place.slot._restarts = Restarts()
        place.slot._restarts.up(0.0)
        place.slot.keep()
        place.first.end()
        place.slot.stop(LATE_S)
        assert place.num_created == 1
        assert not place.slot._thread.is_alive()

    def test_after_close_an_end_is_an_end(self, place):
        place.slot.keep()
        place.slot.close()
        place.first.end()
        place.slot._thread.join(LATE_S)
        assert place.num_created == 1

    def test_one_that_never_was_up_is_killed(self):
        place = FakeReplica(0)
        slot = Slot("decode-0", lambda: place, ManualClock())
        slot.stop(LATE_S)
        assert place.calls == ["kill"]

    def test_all_are_stopped_at_once(self):
        barrier = threading.Barrier(3, timeout=LATE_S)

        class Together(FakeReplica):
            def stop(self, timeout_s):
                barrier.wait()  # breaks unless all three are here
                super().stop(timeout_s)

        clock = ManualClock()
        replicas = [Together(number) for number in range(3)]
        slots = [Slot("w", lambda r=replica: r, clock) for replica in replicas]
        for slot, replica in zip(slots, replicas, strict=True):
            replica.up.put("a:1")
            slot.wait_until_up()
        stop_together(slots, LATE_S)
        assert [replica.calls[0] for replica in replicas] == ["stop"] * 3
