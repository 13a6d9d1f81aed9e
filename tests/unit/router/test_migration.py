"""A decode worker stops: its answers are fetched from it, or read again, and nobody keeps them."""

import asyncio

import pytest

from core.config import Mode
from core.errors import PeerLost, TransferFailed, TransferFailure
from core.worker import CancelRequest, DecodeUpdate, Held, HoldRequest, RequestFailed, Role
from router.dispatch import Dispatcher, DispatchPolicy
from router.members.member import MIN_MIGRATED_TOKENS, Mailbox
from router.placing.load import DecodeLoad, Need
from router.placing.migration import move
from router.placing.recovery import Origin
from router.telemetry.totals import KvCounters
from tests.unit.router.doubles import (
    DONE,
    END,
    FIRST,
    LAYOUT,
    TRANSFER_REPORT,
    make_info,
    make_request,
    reserved,
    token,
    until,
)
from tests.unit.router.test_recovery import Cluster

NUM_PROMPT_TOKENS = MIN_MIGRATED_TOKENS
LARGE = {"num_blocks": 128, "max_context_tokens": 256}
STOPPING = DecodeUpdate(is_draining=True)
LINK_LOST = TransferFailed(TransferFailure.LINK_LOST, "its stream ended")


class Move(Cluster):
    """An answer of three tokens so far, whose decode worker stops."""

    async def begin(self):
        """Until the worker was asked to hold it; its name is old."""
        self.task = self.start(make_request(num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=6))
        self.old, call = await self.prefilling("r")
        call.say(FIRST, TRANSFER_REPORT, END)
        self.old.update(token(1))
        await until(lambda: len(self.tokens) == 2)
        self.old.stream.say(STOPPING)
        await until(lambda: HoldRequest("r") in self.old.commands)

    async def fetching(self):
        """The new worker, and the call that asks the old one to ship."""
        self.old.update(token(2), Held("r"))
        new, command = await self.reserving("r~2")
        assert new is not self.old and not command.prefill_locally
        assert command.request.prompt_token_ids == (*range(NUM_PROMPT_TOKENS), 100, 101, 102)
        _, call = await self.prefilling_at(self.old, "r~2", new)
        return new, call

    async def prefilling_at(self, worker, request_id, decode):
        decode.update(reserved(request_id, decode=decode.info.name))
        await until(lambda: any(c.request.request_id == request_id for c in worker.calls))
        return decode, next(c for c in worker.calls if c.request.request_id == request_id)

    def cancels(self, request_id="r"):
        return self.old.commands.count(CancelRequest(request_id))


@pytest.fixture
async def move_of(fleet, join, clock):
    counters = KvCounters()
    policy = DispatchPolicy(Mode.DISAGGREGATED, max_attempts=3, max_wait_s=0.05)
    async with Dispatcher(fleet, policy, counters, clock) as dispatcher:
        cluster = Move(fleet, dispatcher, counters, clock)
        cluster.decodes = [
            await join("decode-0", **LARGE),
            await join("decode-1", incarnation="2", **LARGE),
        ]
        cluster.prefills = [await join("prefill-0", Role.PREFILL, incarnation="3", **LARGE)]
        yield cluster


async def test_the_next_worker_gets_its_kv_cache_from_the_one_that_stops(move_of):
    await move_of.begin()
    new, call = await move_of.fetching()
    assert (call.held_id, move_of.cancels()) == ("r", 0)
    assert len(move_of.prefills[0].calls) == 1  # the first attempt's
    call.say(FIRST, TRANSFER_REPORT, END)
    new.update(token(1, request_id="r~2"), token(2, request_id="r~2", done=DONE))
    completion = await move_of.task
    assert move_of.tokens == [100, 101, 102, 100, 101, 102]
    assert completion.failures == ()
    assert (completion.prefill_worker, completion.decode_worker) == (
        move_of.old.info.name,
        new.info.name,
    )
    assert "stops and ships the KV cache" in completion.placement
    totals = move_of.counters.totals
    assert (totals.num_migrations, totals.num_migrated_bytes) == (1, TRANSFER_REPORT.num_bytes)
    assert (totals.failed_migrations, totals.num_failed_handoffs) == ((), 0)
    assert move_of.cancels() == 1
    await move_of.nothing_is_left()


async def test_a_migration_that_fails_is_followed_by_reading_it_again(move_of):
    await move_of.begin()
    new, call = await move_of.fetching()
    new.update(RequestFailed("r~2", LINK_LOST))
    again, prefill = await move_of.prefilling("r~3")
    assert prefill.held_id is None
    assert move_of.cancels() == 1
    prefill.say(FIRST, TRANSFER_REPORT, END)
    again.update(*(token(i, request_id="r~3") for i in (1,)), token(2, request_id="r~3", done=DONE))
    completion = await move_of.task
    assert len(move_of.tokens) == 6
    (why,) = completion.failures
    assert why == f"{move_of.old.info.name} to {new.info.name}: {LINK_LOST}"
    totals = move_of.counters.totals
    assert (totals.num_migrations, totals.failed_migrations) == (0, (("link_lost", 1),))
    await move_of.nothing_is_left()


async def test_a_worker_that_dies_while_it_holds_an_answer_is_made_up_for(move_of):
    await move_of.begin()
    move_of.old.update(token(2), Held("r"))
    new, _ = await move_of.reserving("r~2")
    move_of.old.die()
    move_of.decodes.remove(move_of.old)
    await until(lambda: len(move_of.fleet.members(Role.DECODE)) == 1)
    new.update(reserved("r~2", decode=new.info.name))
    _, prefill = await move_of.prefilling("r~3")
    prefill.say(FIRST, TRANSFER_REPORT, END)
    new.update(token(1, request_id="r~3"), token(2, request_id="r~3", done=DONE))
    completion = await move_of.task
    assert len(move_of.tokens) == 6
    assert move_of.counters.totals.failed_migrations == (("peer_lost", 1),)
    assert len(completion.failures) == 1
    await move_of.nothing_is_left()


async def test_what_a_worker_held_is_not_asked_of_the_one_that_follows_it(move_of, join, clock):
    await move_of.begin()
    other = next(worker for worker in move_of.decodes if worker is not move_of.old)
    full = move_of.fleet.decode(other.info.name)
    full.is_draining = True  # so that nobody can take the answer
    move_of.old.update(Held("r"))
    await until(lambda: move_of.dispatcher.num_waiting)
    move_of.old.stream.say(END)
    await until(lambda: len(move_of.fleet.members(Role.DECODE)) == 1)
    move_of.decodes.remove(move_of.old)
    move_of.decodes.append(await join(move_of.old.info.name, incarnation="9", **LARGE))
    new, prefill = await move_of.prefilling("r~2")
    assert (new.info.incarnation, prefill.held_id) == ("9", None)
    prefill.say(FIRST, TRANSFER_REPORT, END)
    new.update(*(token(i, request_id="r~2") for i in (1, 2)))
    new.update(token(3, request_id="r~2", done=DONE))
    assert (await move_of.task).failures == ()
    assert move_of.counters.totals.failed_migrations == ()


async def test_requests_leave_a_stopping_worker_as_soon_as_another_can_take_them(move_of):
    other = move_of.decodes[1]
    member = move_of.fleet.decode(other.info.name)
    member.breaker.failed(move_of.clock.now_s(), is_unreachable=True)
    task = move_of.start(make_request(num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=6))
    old, call = await move_of.prefilling("r")
    call.say(FIRST, TRANSFER_REPORT, END)
    old.update(token(1))
    await until(lambda: len(move_of.tokens) == 2)
    old.stream.say(STOPPING)
    await until(lambda: move_of.fleet.decode(old.info.name).is_draining)
    assert HoldRequest("r") not in old.commands
    member.breaker.succeeded()
    old.answer_heartbeat(is_draining=True)
    await until(lambda: HoldRequest("r") in old.commands)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_dies_before_it_holds_the_answer_is_a_death_like_any(move_of):
    await move_of.begin()
    move_of.old.die()
    move_of.decodes.remove(move_of.old)
    new, prefill = await move_of.prefilling("r~2")
    assert prefill.held_id is None
    prefill.say(FIRST, TRANSFER_REPORT, END)
    new.update(*(token(i, request_id="r~2") for i in (1, 2)))
    new.update(token(3, request_id="r~2", done=DONE))
    assert len((await move_of.task).failures) == 1
    assert move_of.counters.totals.failed_migrations == ()
    await move_of.nothing_is_left()


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_client_that_leaves_meanwhile_frees_what_is_held(move_of, is_asked):
    await move_of.begin()
    move_of.old.update(Held("r"))
    await move_of.reserving("r~2")
    if is_asked:
        new, _ = await move_of.reserving("r~2")
        await move_of.prefilling_at(move_of.old, "r~2", new)
    move_of.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move_of.task
    assert move_of.cancels() == 1
    await until(lambda: move_of.old.num_open_calls == 0)
    await move_of.nothing_is_left()


async def test_an_answer_that_its_text_ends_as_it_is_held_needs_no_move(move_of):
    async def deliver(tokens):
        move_of.tokens += [token.token_id for token in tokens]
        return 1 if 102 in move_of.tokens else None

    move_of.deliver = deliver
    await move_of.begin()
    move_of.old.update(token(2), Held("r"))
    await move_of.task
    assert move_of.cancels() == 1
    await move_of.nothing_is_left()


async def test_short_answers_and_those_of_a_cluster_that_recomputes_are_not_held(
    fleet, join, clock
):
    await join("decode-0")
    await join("decode-1", incarnation="2")
    member = fleet.decode("decode-0")
    long, short, waits = (Mailbox(clock, n) for n in (64, MIN_MIGRATED_TOKENS - 1, 64))
    long.has_token = short.has_token = True
    with (
        member.receiving("long", long),
        member.receiving("short", short),
        member.receiving("waits", waits),
    ):
        member.hand_over(may_migrate=True)
        member.hand_over(may_migrate=True)
        assert member._session.sent.count(HoldRequest("long")) == 1
        for mailbox in (short, waits):
            ((event, _),) = await mailbox.get()
            assert isinstance(event, RequestFailed)
    grown = Mailbox(clock, MIN_MIGRATED_TOKENS - 1)
    with member.receiving("grown", grown):
        member._session.say(DecodeUpdate(tokens=(token(1, request_id="grown"),)))
        await grown.get()
        member.hand_over(may_migrate=True)
        assert HoldRequest("grown") in member._session.sent
    recomputed = Mailbox(clock, 64)
    recomputed.has_token = True
    with member.receiving("r", recomputed):
        member.hand_over(may_migrate=False)
        ((event, _),) = await recomputed.get()
        assert isinstance(event.error, PeerLost)


class TestWhere:
    ORIGIN = Origin("decode-9", "9", LAYOUT, "r")
    NEED = Need(70, 90)

    def load(self, name, num_sequences, **changes):
        info = make_info(name, **LARGE | changes)
        return DecodeLoad.of(info, num_sequences)

    def test_the_emptiest_that_can_hold_it(self):
        loads = [self.load("decode-0", 3), self.load("decode-1", 1), self.load("decode-2", 2)]
        placement = move(self.ORIGIN, self.NEED, loads)
        assert (placement.prefill, placement.decode) == ("decode-9", "decode-1")
        assert (placement.held_id, placement.prefill_incarnation) == ("r", "9")

    def test_nobody_where_it_does_not_fit_or_its_blocks_do_not(self):
        other = LAYOUT.__class__("another", LAYOUT.dtype, 4, 2, 1, 8)
        loads = [
            self.load("small", 0, max_context_tokens=80),
            self.load("full", 8),
            self.load("other", 0, layout=other),
        ]
        assert move(self.ORIGIN, self.NEED, loads) is None
