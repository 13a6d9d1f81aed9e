"""Workers that stop, hang or cannot be reached: what the fleet does about them."""

import logging

import pytest

from core.backoff import Backoff
from core.errors import PeerLost, PeerStopping
from core.worker import DecodeUpdate, RequestFailed, Role
from router.members import fleet as fleet_module
from router.members.member import Mailbox
from tests.unit.router.doubles import (
    WEDGED_AFTER_S,
    WORKER_TIMEOUT_S,
    make_request,
    token,
    until,
)

STOPPING = DecodeUpdate(is_draining=True)


class TestADecodeWorkerThatStops:
    async def test_gets_nothing_new_from_the_moment_it_says_so(self, fleet, join):
        worker = await join("decode-0")
        await join("decode-1")
        worker.stream.say(STOPPING)
        await until(lambda: [load.name for load in fleet.decode_loads()] == ["decode-1"])
        assert len(fleet.members(Role.DECODE)) == 2

    async def test_hands_its_requests_over_when_another_can_go_on(self, fleet, join, clock):
        worker = await join("decode-0")
        await join("decode-1")
        mailbox = Mailbox(clock)
        with fleet.decode("decode-0").receiving("r", mailbox):
            worker.update(token(0))
            ((first, _),) = await mailbox.get()
            worker.stream.say(STOPPING)
            ((second, _),) = await mailbox.get()
        assert first == token(0)
        assert isinstance(second, RequestFailed)
        assert isinstance(second.error, PeerStopping)

    async def test_finishes_them_while_it_is_the_only_one(self, fleet, join, clock):
        worker = await join("decode-0")
        mailbox = Mailbox(clock)
        with fleet.decode("decode-0").receiving("r", mailbox):
            worker.stream.say(STOPPING)
            worker.update(token(0))
            assert [event for event, _ in await mailbox.get()] == [token(0)]
            await join("decode-1")
            ((event, _),) = await mailbox.get()
            assert isinstance(event.error, PeerStopping)

    async def test_is_no_relief_for_another_that_stops(self, fleet, join, clock):
        workers = [await join("decode-0"), await join("decode-1")]
        mailbox = Mailbox(clock)
        with fleet.decode("decode-1").receiving("r", mailbox):
            for worker in workers:
                worker.stream.say(STOPPING)
            await until(lambda: fleet.decode_loads() == [])
            workers[1].update(token(0))
            assert [event for event, _ in await mailbox.get()] == [token(0)]


async def test_a_prefill_worker_that_stops_says_so_in_its_status(fleet, join):
    worker = await join("prefill-0", Role.PREFILL)
    worker.answer_heartbeat(is_draining=True)
    await until(lambda: fleet.prefill_loads() == [])
    assert len(fleet.members(Role.PREFILL)) == 1


class TestAWedgedWorker:
    async def wedge(self, worker, clock):
        worker.answer_heartbeat(num_steps=7, num_runnable_requests=2)
        await until(lambda: worker.num_heartbeats == 2)
        clock.advance(WEDGED_AFTER_S)
        worker.answer_heartbeat()

    @pytest.mark.parametrize("role", Role)
    async def test_is_lost_although_it_answers(self, fleet, join, clock, role):
        worker = await join("worker-0", role)
        await self.wedge(worker, clock)
        await until(lambda: fleet.members(role) == [])
        (stuck,) = fleet.stuck
        assert (stuck.name, stuck.address) == ("worker-0", "worker-0:1")
        assert stuck.why == "wedged: no step for 60 s while work waits"
        clock.advance(3.0)
        assert fleet.stuck[0].age_s == 3.0

    async def test_fails_its_requests(self, fleet, join, clock):
        worker = await join("decode-0")
        mailbox = Mailbox(clock)
        with fleet.decode("decode-0").receiving("r", mailbox):
            await self.wedge(worker, clock)
            ((event, _),) = await mailbox.get()
        assert (event.error.peer, event.error.why) == ("decode-0", fleet.stuck[0].why)

    async def test_is_not_believed_until_it_does_a_step(self, fleet, join, clock, cluster):
        worker = await join("decode-0")
        await self.wedge(worker, clock)
        num_peers = len(cluster.peers)
        await until(lambda: len(cluster.peers) > num_peers + 2)
        assert fleet.members(Role.DECODE) == []
        worker.answer_heartbeat(num_steps=8, num_runnable_requests=0)
        await until(lambda: len(fleet.members(Role.DECODE)) == 1)
        assert fleet.stuck == []

    async def test_is_followed_by_another_incarnation(self, fleet, join, clock, cluster):
        await self.wedge(await join("decode-0"), clock)
        await until(lambda: fleet.members(Role.DECODE) == [])
        successor = cluster.start("decode-0", incarnation="2")
        await until(lambda: [m.info for m in fleet.members(Role.DECODE)] == [successor.info])
        assert fleet.stuck == []

    async def test_is_forgotten_when_it_is_removed(self, fleet, join, clock):
        worker = await join("decode-0")
        await self.wedge(worker, clock)
        await until(lambda: len(fleet.stuck) == 1)
        await fleet.remove(worker.address)
        assert fleet.stuck == []

    async def test_is_none_that_does_steps(self, fleet, join, clock):
        worker = await join("decode-0")
        for num_steps in range(5):
            worker.answer_heartbeat(num_steps=num_steps, num_runnable_requests=2)
            await until(lambda n=num_steps: worker.num_heartbeats == n + 2)
            clock.advance(WEDGED_AFTER_S - 1.0)
        assert len(fleet.members(Role.DECODE)) == 1


async def test_a_silent_worker_is_stuck_until_it_answers(fleet, join, clock):
    worker = await join("decode-0")
    await until(lambda: worker.num_heartbeats == 1)
    worker.refusal = PeerLost("decode-0", "no answer")
    worker.leave_heartbeat_unanswered()
    clock.advance(WORKER_TIMEOUT_S)
    await until(lambda: fleet.members(Role.DECODE) == [])
    assert [stuck.why for stuck in fleet.stuck] == ["it has said nothing for 4 s"]
    worker.refusal = None
    await until(lambda: len(fleet.members(Role.DECODE)) == 1)
    assert fleet.stuck == []


class TestTrying:
    async def test_the_same_error_is_logged_once(self, fleet, cluster, caplog):
        worker = cluster.start("decode-0")
        worker.refusal = PeerLost("decode-0", "not there yet")
        with caplog.at_level(logging.INFO, "twophase.fleet"):
            fleet.add(worker.address)
            await until(lambda: len(cluster.peers) > 5)
            worker.refusal = PeerLost("decode-0", "still not")
            await until(lambda: len(caplog.records) == 2)
        assert ["not there" in caplog.messages[0], "still not" in caplog.messages[1]] == [True] * 2

    async def test_a_bug_is_told_with_its_trace_and_the_others_live(
        self, fleet, cluster, join, caplog
    ):
        await join("decode-0")
        worker = cluster.start("decode-1")
        worker.refusal = ZeroDivisionError("a bug")
        fleet.add(worker.address)
        num_peers = len(cluster.peers)
        await until(lambda: len(cluster.peers) > num_peers + 3)
        (record,) = [record for record in caplog.records if "a bug" in record.getMessage()]
        assert (record.levelname, record.exc_info[0]) == ("ERROR", ZeroDivisionError)
        assert [m.info.name for m in fleet.members(Role.DECODE)] == ["decode-0"]
        worker.refusal = None
        await until(lambda: len(fleet.members(Role.DECODE)) == 2)

    async def test_waits_grow_while_it_fails(self, fleet, cluster, monkeypatch):
        waits = []

        class Recorded(Backoff):
            def next_s(self):
                waits.append(super().next_s())
                return 0.0

        monkeypatch.setattr(fleet_module, "RECONNECT_S", 0.5)
        monkeypatch.setattr(fleet_module, "Backoff", Recorded)
        worker = cluster.start("decode-0")
        worker.refusal = PeerLost("decode-0", "not there")
        fleet.add(worker.address)
        await until(lambda: len(waits) == 7)
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
        worker.refusal = None
        await fleet.wait_for(worker.address, 5.0)
        worker.die()
        await until(lambda: len(waits) > 8)
        assert waits[waits.index(0.5, 1) :][:2] == [0.5, 1.0]


async def test_a_token_of_a_request_clears_its_decode_worker(fleet, join, clock):
    worker = await join("decode-0")
    member, mailbox = fleet.decode("decode-0"), Mailbox(clock)
    member.breaker.failed(clock.now_s(), is_unreachable=True)
    assert not member.is_usable(clock.now_s())
    with member.serving(make_request()), member.receiving("r", mailbox):
        worker.update(token(0))
        await mailbox.get()
    assert member.is_usable(clock.now_s())
