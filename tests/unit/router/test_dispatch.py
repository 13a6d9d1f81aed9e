"""Lives of a request at the router, over the real fleet: who is told what, and nothing is left."""

import asyncio

import pytest

from core.config import Mode
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerLost,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.settings.router import OnFailure
from core.worker import CancelRequest, RequestFailed, Reserve, Role
from router import dispatch
from router.answer import Answer
from router.dispatch import Dispatcher, DispatchPolicy
from router.telemetry.totals import KvCounters
from tests.unit.router.doubles import (
    DONE,
    END,
    FIRST,
    PREFILL_REPORT,
    TRANSFER_REPORT,
    make_request,
    reserved,
    token,
    until,
)


class World:
    """One request after the other on a small cluster, and what the client got."""

    def __init__(self, fleet, dispatcher, clock):
        self.fleet, self.dispatcher, self.clock = fleet, dispatcher, clock
        self.delivered = []
        self.decode = self.prefill = None

    async def deliver(self, tokens):
        self.delivered.append([token.token_id for token in tokens])

    def start(self, request, deliver=None):
        return asyncio.create_task(
            self.dispatcher.run(
                Answer(request, self.clock.now_s(), 0.0), deliver=deliver or self.deliver
            )
        )

    async def nothing_is_left(self):
        """No mailbox, no load, no open call; every Reserve was followed by its Cancel."""
        await until(lambda: self.dispatcher.num_prefill_calls == 0)
        assert self.fleet.num_mailboxes == 0
        for member in (*self.fleet.members(Role.DECODE), *self.fleet.members(Role.PREFILL)):
            assert (member.num_requests, member.num_prompt_tokens) == (0, 0)
        assert self.prefill is None or self.prefill.num_open_calls == 0
        reserves = [c.request.request_id for c in self.decode.commands if isinstance(c, Reserve)]
        cancels = [c.request_id for c in self.decode.commands if isinstance(c, CancelRequest)]
        assert reserves == cancels


def dispatching(fleet, clock, mode):
    """A dispatcher that makes one attempt; test_recovery has those that make more."""
    return Dispatcher(fleet, DispatchPolicy(mode, on_failure=OnFailure.FAIL), KvCounters(), clock)


@pytest.fixture
async def split(fleet, join, clock):
    """One prefill and one decode worker."""
    async with dispatching(fleet, clock, Mode.DISAGGREGATED) as dispatcher:
        world = World(fleet, dispatcher, clock)
        world.decode = await join("decode-0")
        world.prefill = await join("prefill-0", Role.PREFILL)
        yield world


@pytest.fixture
async def chunked(fleet, join, clock):
    """One decode worker that reads the prompts."""
    async with dispatching(fleet, clock, Mode.CHUNKED) as dispatcher:
        world = World(fleet, dispatcher, clock)
        world.decode = await join("decode-0")
        yield world


async def reach(world, state, request):
    """Bring `request` into `state`; its task, and its prefill call where there is one."""
    task = world.start(request)
    await until(lambda: world.decode.commands)
    if state == "reserving":
        return task, None
    world.decode.update(reserved())
    await until(lambda: world.prefill.calls)
    call = world.prefill.calls[-1]
    if state == "prefilling":
        return task, call
    call.say(FIRST)
    await until(lambda: world.delivered)
    if state == "transferring":
        return task, call
    world.decode.update(token(1))
    await until(lambda: len(world.delivered) == 2)
    return task, call


STATES = ["reserving", "prefilling", "transferring", "decoding"]


class TestAWholeLife:
    async def test_in_two_pools(self, split):
        request = make_request(max_tokens=3)
        # 1 decode reserves first
        task = split.start(request)
        await until(lambda: split.decode.commands)
        assert split.decode.commands == [Reserve(request, prefill_locally=False)]
        assert split.prefill.calls == []
        # 2 prefill is given what decode reserved
        split.decode.update(reserved())
        await until(lambda: split.prefill.calls)
        (call,) = split.prefill.calls
        assert (call.request, call.reservation) == (request, reserved().reservation)
        # 3 the first token goes out at once
        call.say(FIRST)
        await until(lambda: split.delivered)
        assert split.delivered == [[100]]
        # 4 the others follow, several at once where they came together
        call.say(TRANSFER_REPORT, END)
        split.decode.update(token(1), token(2, done=DONE))
        completion = await task
        assert split.delivered == [[100], [101, 102]]
        assert completion.usage.num_output_tokens == 3
        assert completion.transfer == TRANSFER_REPORT
        assert (completion.prefill_worker, completion.decode_worker) == ("prefill-0", "decode-0")
        # 5 nothing is left
        await split.nothing_is_left()

    async def test_where_the_decode_worker_reads_the_prompt(self, chunked):
        request = make_request(max_tokens=2)
        task = chunked.start(request)
        await until(lambda: chunked.decode.commands)
        assert chunked.decode.commands == [Reserve(request, prefill_locally=True)]
        chunked.decode.update(reserved())
        chunked.decode.update(token(0, prefill=PREFILL_REPORT))
        chunked.decode.update(token(1, done=DONE))
        completion = await task
        assert chunked.delivered in ([[100], [101]], [[100, 101]])
        assert completion.transfer is None
        await chunked.nothing_is_left()

    async def test_that_ends_with_its_first_token_gives_up_the_handoff(self, split):
        request = make_request(max_tokens=1)
        task = split.start(request)
        split.decode.update(reserved())
        await until(lambda: split.prefill.calls)
        split.prefill.calls[0].say(FIRST)
        completion = await task
        assert split.delivered == [[100]]
        assert completion.transfer is None
        await split.nothing_is_left()

    async def test_of_many_at_once_does_not_mix_their_tokens(self, split):
        got = {f"r{number}": [] for number in range(5)}
        tasks = []
        for name, log in got.items():

            async def deliver(tokens, log=log):
                log.extend(token.token_id for token in tokens)

            tasks.append(split.start(make_request(name, max_tokens=2), deliver))
        await until(lambda: len(split.decode.commands) == 5)
        split.decode.update(*(reserved(name) for name in got))
        await until(lambda: len(split.prefill.calls) == 5)
        for number, call in enumerate(split.prefill.calls):
            assert call.request.request_id == f"r{number}"
            call.say(FIRST, TRANSFER_REPORT, END)
        split.decode.update(
            *(
                token(1, request_id=name, token_id=500 + number, done=DONE)
                for number, name in enumerate(got)
            )
        )
        await asyncio.gather(*tasks)
        assert got == {f"r{number}": [100, 500 + number] for number in range(5)}
        assert split.fleet.num_mailboxes == 0

    async def test_a_late_word_about_an_ended_request_reaches_nobody(self, split):
        task = split.start(make_request(max_tokens=1))
        split.decode.update(reserved())
        await until(lambda: split.prefill.calls)
        split.prefill.calls[0].say(FIRST)
        await task
        split.decode.update(token(1), RequestFailed("r", PeerLost("x", "late")))
        await split.nothing_is_left()


@pytest.mark.parametrize("state", STATES)
class TestEveryState:
    async def test_the_client_goes_away(self, split, state):
        task, _ = await reach(split, state, make_request())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await split.nothing_is_left()

    async def test_the_deadline_passes(self, split, state):
        request = make_request(deadline_s=split.clock.now_s() + 0.02)
        task, _ = await reach(split, state, request)
        with pytest.raises(DeadlineExceeded, match="request r was not done within its deadline"):
            await task
        await split.nothing_is_left()

    async def test_decode_gives_the_request_up(self, split, state):
        task, _ = await reach(split, state, make_request())
        error = TransferFailed(TransferFailure.CHECKSUM, "piece 3")
        split.decode.update(RequestFailed("r", error))
        with pytest.raises(TransferFailed) as caught:
            await task
        assert caught.value is error
        await split.nothing_is_left()

    async def test_the_decode_worker_dies(self, split, state):
        task, _ = await reach(split, state, make_request())
        split.decode.die()
        with pytest.raises(PeerLost, match="decode-0 was lost: killed"):
            await task
        await split.nothing_is_left()


async def test_a_delivery_that_fails_ends_the_request(split):
    async def broken(token_ids):
        raise PeerLost("client", "broken pipe")

    task = split.start(make_request(), broken)
    split.decode.update(reserved())
    await until(lambda: split.prefill.calls)
    split.prefill.calls[0].say(FIRST)
    with pytest.raises(PeerLost, match="broken pipe"):
        await task
    await split.nothing_is_left()


@pytest.mark.parametrize("state", ["prefilling", "transferring"])
@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full"),
        InvalidRequest("prompt", "9 tokens", "too long"),
        TransferFailed(TransferFailure.LINK_LOST, "broken"),
        PeerLost("prefill-0", "killed"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_prefill_that_fails_ends_the_request_with_its_error(split, state, error):
    task, call = await reach(split, state, make_request())
    call.say(error)
    with pytest.raises(type(error)) as caught:
        await task
    assert caught.value is error
    await split.nothing_is_left()


ECHO = TransferFailed(TransferFailure.ABORTED, "the sender gave the request up")


class TestRootCause:
    @pytest.mark.parametrize("cause", [TwophaseError("on fire"), PeerLost("prefill-0", "killed")])
    async def test_what_prefill_says_itself_counts_though_decode_was_heard_first(
        self, split, cause
    ):
        task, call = await reach(split, "prefilling", make_request())
        split.decode.update(RequestFailed("r", ECHO))
        await until(lambda: not split.decode.stream._incoming.qsize())
        call.say(cause)
        with pytest.raises(type(cause)) as caught:
            await task
        assert caught.value is cause
        await split.nothing_is_left()

    async def test_what_decode_says_itself_counts_though_prefill_was_heard_first(self, split):
        task, call = await reach(split, "prefilling", make_request())
        call.say(TransferFailed(TransferFailure.ABORTED, "decode gave the request up"))
        await until(lambda: not call._incoming.qsize())
        cause = Overloaded("no blocks")
        split.decode.update(RequestFailed("r", cause))
        with pytest.raises(Overloaded) as caught:
            await task
        assert caught.value is cause
        await split.nothing_is_left()

    async def test_if_both_say_no_more_than_that_nothing_is_waited_for(self, split, monkeypatch):
        monkeypatch.setattr(dispatch, "CAUSE_S", 60.0)
        task, call = await reach(split, "prefilling", make_request())
        split.decode.update(RequestFailed("r", ECHO))
        call.say(TransferFailed(TransferFailure.ABORTED, "decode gave the request up"))
        with pytest.raises(TransferFailed):
            async with asyncio.timeout(5):
                await task
        await split.nothing_is_left()

    async def test_if_nobody_says_more_that_is_told_soon(self, split, monkeypatch):
        monkeypatch.setattr(dispatch, "CAUSE_S", 0.01)
        task, _ = await reach(split, "prefilling", make_request())
        split.decode.update(RequestFailed("r", ECHO))
        with pytest.raises(TransferFailed) as caught:
            await task
        assert caught.value is ECHO
        await split.nothing_is_left()


class TestNobodyToServe:
    async def test_without_workers_the_request_fails_at_once(self, fleet, clock):
        async with dispatching(fleet, clock, Mode.DISAGGREGATED) as dispatcher:
            with pytest.raises(PeerLost, match="no decode worker can be used"):
                await World(fleet, dispatcher, clock).start(make_request())

    async def test_a_prefill_worker_that_left_before_its_turn_fails_only_that_request(self, split):
        task, _ = await reach(split, "reserving", make_request())
        split.prefill.die()
        await until(lambda: split.fleet.members(Role.PREFILL) == [])
        split.decode.update(reserved())
        with pytest.raises(PeerLost, match="prefill-0"):
            await task
        await split.nothing_is_left()

    async def test_a_request_that_is_late_already_waits_for_nothing(self, split):
        with pytest.raises(DeadlineExceeded):
            await split.start(make_request(deadline_s=split.clock.now_s() - 1.0))
        await split.nothing_is_left()


async def test_the_same_id_can_be_used_again_after_a_cancel(split):
    task, _ = await reach(split, "prefilling", make_request())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    again = split.start(make_request(max_tokens=1))
    split.decode.update(reserved())
    await until(lambda: len(split.prefill.calls) == 2)
    split.prefill.calls[1].say(FIRST)
    assert (await again).usage.num_output_tokens == 1
    await split.nothing_is_left()


@pytest.mark.parametrize("is_own_address", [True, False])
async def test_a_prefill_worker_that_cannot_be_reached_gets_no_request_until_it_answers(
    split, is_own_address
):
    lost_peer = split.prefill.address if is_own_address else "decode-0"
    task, call = await reach(split, "prefilling", make_request())
    call.say(PeerLost(lost_peer, "connection refused"))
    with pytest.raises(PeerLost):
        await task

    assert len(split.fleet.prefill_loads()) == (0 if is_own_address else 1)
    await split.nothing_is_left()
