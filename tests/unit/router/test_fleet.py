"""Who is connected, what they were given, and who is told when a worker is lost."""

import pytest

from core.errors import PeerLost
from core.worker import CancelRequest, DecodeUpdate, RequestFailed, Role
from router.members.fleet import Fleet
from router.members.member import Mailbox
from tests.unit.router.doubles import (
    END,
    PREFILL_REPORT,
    WORKER_TIMEOUT_S,
    make_request,
    reserved,
    token,
    until,
)


class TestMailbox:
    async def test_gives_all_that_came_in_order_with_its_time(self, clock):
        mailbox = Mailbox(clock)
        mailbox.put(reserved())
        clock.advance(1.0)
        mailbox.put(token(0))
        assert await mailbox.get() == [(reserved(), 1000.0), (token(0), 1001.0)]
        mailbox.put(token(1))
        assert await mailbox.get() == [(token(1), 1001.0)]


class TestMembers:
    async def test_a_worker_is_a_member_once_connected(self, fleet, join):
        assert fleet.members(Role.DECODE) == []
        await join("decode-0")
        await join("prefill-0", Role.PREFILL)
        assert [m.info.name for m in fleet.members(Role.DECODE)] == ["decode-0"]
        assert [m.info.name for m in fleet.members(Role.PREFILL)] == ["prefill-0"]
        assert fleet.decode("decode-0").info.role is Role.DECODE
        assert fleet.prefill("prefill-0").info.role is Role.PREFILL

    async def test_a_prefill_worker_that_is_gone_is_a_lost_peer(self, fleet):
        with pytest.raises(PeerLost, match="prefill-0"):
            fleet.prefill("prefill-0")

    async def test_adding_twice_connects_once(self, fleet, cluster, join):
        worker = await join("decode-0")
        fleet.add(worker.address)
        assert len(cluster.peers) == 1

    async def test_its_load_is_what_it_was_given_and_not_more(self, fleet, join):
        await join("decode-0")
        await join("prefill-0", Role.PREFILL)
        decode, prefill = fleet.decode("decode-0"), fleet.prefill("prefill-0")
        with decode.serving(make_request()), prefill.serving(make_request(num_prompt_tokens=7)):
            assert decode.num_requests == 1
            assert prefill.num_prompt_tokens == 7
        assert decode.num_requests == 0
        assert prefill.num_prompt_tokens == 0

    async def test_a_failure_gives_the_load_back(self, fleet, join):
        await join("decode-0")
        member = fleet.decode("decode-0")
        with pytest.raises(ZeroDivisionError), member.serving(make_request()):
            raise ZeroDivisionError
        assert (member.num_requests, member.num_prompt_tokens) == (0, 0)

    async def test_statuses_name_who_does_not_answer(self, fleet, join):
        await join("decode-0")
        worker = await join("decode-1")
        worker.refusal = PeerLost("decode-1", "silent")
        statuses, silent = await fleet.statuses(1.0)
        assert [status.name for status in statuses] == ["decode-0"]
        assert silent == ["decode-1"]

    async def test_a_name_that_is_taken_is_not_believed(self, fleet, cluster, join):
        await join("decode-0")
        twin = cluster.start("decode-0", incarnation="2")
        twin.address = "elsewhere:1"
        cluster.workers = {twin.address: twin}
        fleet.add(twin.address)
        await until(lambda: len(cluster.peers) > 2)
        assert [m.info.incarnation for m in fleet.members(Role.DECODE)] == ["1"]


class TestWaiting:
    async def test_whoever_waits_is_told_what_the_worker_is(self, fleet, join, cluster):
        worker = await join("decode-0")
        assert await fleet.wait_for(worker.address, 1.0) == worker.info

    async def test_it_gives_up_in_time(self, fleet):
        with pytest.raises(PeerLost, match="not connected within 0.01 s"):
            await fleet.wait_for("nowhere:1", 0.01)


class TestMailboxes:
    async def test_what_a_worker_says_reaches_the_request_that_it_names(self, fleet, join, clock):
        worker = await join("decode-0")
        member, a, b = fleet.decode("decode-0"), Mailbox(clock), Mailbox(clock)
        with member.receiving("a", a), member.receiving("b", b):
            assert fleet.num_mailboxes == 2
            worker.update(reserved("a"), token(0, request_id="b"), token(0, request_id="unknown"))
            assert [event for event, _ in await a.get()] == [reserved("a")]
            assert [event for event, _ in await b.get()] == [token(0, request_id="b")]
        assert fleet.num_mailboxes == 0
        assert worker.commands == [CancelRequest("b"), CancelRequest("a")]

    async def test_of_one_update_grants_come_before_tokens_before_failures(
        self, fleet, join, clock
    ):
        worker = await join("decode-0")
        member, mailbox = fleet.decode("decode-0"), Mailbox(clock)
        failed = RequestFailed("r", PeerLost("x", "y"))
        events = [reserved(), token(0, prefill=PREFILL_REPORT), failed]
        with member.receiving("r", mailbox):
            worker.stream.say(DecodeUpdate((events[0],), (events[1],), (events[2],)))
            assert [event for event, _ in await mailbox.get()] == events


@pytest.mark.parametrize("end", ["killed", "stream ended"])
class TestALostDecodeWorker:
    def lose(self, worker, end):
        if end == "killed":
            worker.die(end)
        else:
            worker.refusal = PeerLost(worker.info.name, end)
            worker.stream.say(END)

    async def test_fails_everybody_who_waits_for_it_and_is_no_member(self, fleet, join, clock, end):
        worker = await join("decode-0")
        member, mailbox = fleet.decode("decode-0"), Mailbox(clock)
        with member.receiving("r", mailbox):
            changed = fleet.changed
            self.lose(worker, end)
            ((event, _),) = await mailbox.get()
            assert (event.request_id, str(event.error)) == ("r", f"decode-0 was lost: {end}")
            assert changed.is_set()
            assert fleet.members(Role.DECODE) == []
        assert worker.stream.is_closed

    async def test_comes_back_as_a_new_incarnation_with_nothing_to_do(
        self, fleet, join, cluster, end
    ):
        worker = await join("decode-0")
        with fleet.decode("decode-0").serving(make_request()):
            successor = cluster.start("decode-0", incarnation="2")
            self.lose(worker, end)
            await until(lambda: [m.info for m in fleet.members(Role.DECODE)] == [successor.info])
            assert fleet.decode("decode-0").num_requests == 0


async def test_a_prefill_worker_whose_connection_breaks_is_no_member(fleet, join):
    worker = await join("prefill-0", Role.PREFILL)
    worker.die()
    await until(lambda: fleet.members(Role.PREFILL) == [])


@pytest.mark.parametrize("role", Role)
async def test_a_worker_that_says_nothing_at_all_is_lost(fleet, join, clock, role):
    worker = await join("worker-0", role)
    clock.advance(WORKER_TIMEOUT_S)
    worker.leave_heartbeat_unanswered()
    await until(lambda: fleet.members(role) == [])


async def test_tokens_are_a_sign_of_life_while_the_heartbeat_is_late(fleet, join, clock):
    worker = await join("decode-0")
    mailbox = Mailbox(clock)
    with fleet.decode("decode-0").receiving("r", mailbox):
        clock.advance(WORKER_TIMEOUT_S)
        worker.update(token(0))
        await mailbox.get()
        worker.leave_heartbeat_unanswered()
        await until(lambda: worker.num_heartbeats == 2)
        assert [m.info for m in fleet.members(Role.DECODE)] == [worker.info]


async def test_a_removed_worker_is_forgotten_and_its_connection_closed(fleet, cluster, join):
    worker = await join("decode-0")
    await fleet.remove(worker.address)
    assert fleet.members(Role.DECODE) == []
    assert [peer.is_closed for peer in cluster.peers] == [True]
    await fleet.remove(worker.address)


async def test_leaving_closes_every_connection(cluster, clock):
    async with Fleet(clock, worker_timeout_s=WORKER_TIMEOUT_S, wedged_after_s=60.0) as fleet:
        for name in ("decode-0", "decode-1"):
            fleet.add(cluster.start(name).address)
        await until(lambda: len(fleet.members(Role.DECODE)) == 2)
    assert fleet.members(Role.DECODE) == []
    assert [peer.is_closed for peer in cluster.peers] == [True, True]


async def test_a_decode_worker_that_left_after_it_was_placed_is_lost(fleet):
    with pytest.raises(PeerLost, match="disconnected"):
        fleet.decode("decode-7")
