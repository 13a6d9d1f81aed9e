"""A request outlives its workers: it goes on elsewhere from its last token, each token once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Mode
from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerLost,
    PeerStopping,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.request import FinishReason, attempt_id, id_of_attempt
from core.settings.router import OnFailure
from core.worker import CancelRequest, RequestFailed, Reserve, Role
from router.answer import Answer
from router.dispatch import Dispatcher, DispatchPolicy
from router.placing.load import DecodeLoad, Loads, PrefillLoad
from router.placing.placement import Placement
from router.placing.recovery import Failure, Recovery
from router.telemetry.totals import KvCounters
from tests.unit.router.doubles import (
    DONE,
    END,
    FIRST,
    LAYOUT,
    PREFILL_REPORT,
    TRANSFER_REPORT,
    make_request,
    reserved,
    token,
    until,
)

PAIR = Placement("prefill-0", "decode-0", "because", "p", "d")
MOVE = Placement("decode-9", "decode-0", "because", "9", "d", held_id="r")
LINK_LOST = TransferFailed(TransferFailure.LINK_LOST, "its stream ended")


class Cluster:
    """Two workers of each phase, whose words the test says, and one client."""

    def __init__(self, fleet, dispatcher, counters, clock):
        self.fleet, self.dispatcher, self.counters = fleet, dispatcher, counters
        self.clock = clock
        self.tokens = []

    async def deliver(self, tokens):
        self.tokens += [token.token_id for token in tokens]

    def start(self, request):
        now_s = self.clock.now_s()
        run = self.dispatcher.run(Answer(request, now_s, 0.0), deliver=self.deliver)
        return asyncio.create_task(run)

    def reserve_of(self, request_id):
        """(worker, request) of the attempt with this id, once decode was asked for blocks."""
        for worker in self.decodes:
            for command in worker.commands:
                if isinstance(command, Reserve) and command.request.request_id == request_id:
                    return worker, command
        return None

    async def reserving(self, request_id):
        await until(lambda: self.reserve_of(request_id))
        return self.reserve_of(request_id)

    async def prefilling(self, request_id):
        worker, _ = await self.reserving(request_id)
        worker.update(reserved(request_id, decode=worker.info.name))

        def calls():
            calls = [call for prefill in self.prefills for call in prefill.calls]
            return [call for call in calls if call.request.request_id == request_id]

        await until(calls)
        return worker, calls()[0]

    async def nothing_is_left(self):
        await until(lambda: self.dispatcher.num_prefill_calls == 0)
        assert self.fleet.num_mailboxes == 0
        for member in (*self.fleet.members(Role.DECODE), *self.fleet.members(Role.PREFILL)):
            assert (member.num_requests, member.num_prompt_tokens) == (0, 0)
        for worker in self.decodes:
            reserves = [c.request.request_id for c in worker.commands if isinstance(c, Reserve)]
            cancels = [c.request_id for c in worker.commands if isinstance(c, CancelRequest)]
            assert reserves == cancels


@pytest.fixture
async def cluster(fleet, join, clock):
    counters = KvCounters()
    policy = DispatchPolicy(Mode.DISAGGREGATED, max_attempts=3, max_wait_s=0.05)
    async with Dispatcher(fleet, policy, counters, clock) as dispatcher:
        cluster = Cluster(fleet, dispatcher, counters, clock)
        cluster.join = join
        cluster.decodes = [await join("decode-0"), await join("decode-1", incarnation="2")]
        cluster.prefills = [
            await join("prefill-0", Role.PREFILL, incarnation="3"),
            await join("prefill-1", Role.PREFILL, incarnation="4"),
        ]
        yield cluster


async def test_where_all_workers_were_lost_it_waits_for_the_next_though_some_came_back(cluster):
    policy = DispatchPolicy(Mode.CHUNKED, max_attempts=3, max_wait_s=5.0)
    async with Dispatcher(cluster.fleet, policy, KvCounters(), cluster.clock) as dispatcher:
        cluster.dispatcher = dispatcher
        task = cluster.start(make_request(max_tokens=1))
        for name in ("r", "r~2"):
            decode, _ = await cluster.reserving(name)
            # Silent for too long, and there again when the next one is lost: but it was tried.
            decode.update(RequestFailed(name, PeerLost(decode.info.name, "it said nothing")))
        await until(lambda: dispatcher.num_waiting)
        cluster.decodes.append(await cluster.join("decode-2", incarnation="5"))
        decode, _ = await cluster.reserving("r~3")
        assert decode.info.name == "decode-2"
        decode.update(
            reserved("r~3", decode="decode-2"),
            token(0, request_id="r~3", done=DONE, prefill=PREFILL_REPORT),
        )
        await task
        assert cluster.tokens == [100]
        await cluster.nothing_is_left()


class TestAnAnswerThatItsTextEnds:
    async def test_keeps_the_tokens_up_to_the_end_and_gives_up_the_rest(self, cluster):
        async def deliver(tokens):
            cluster.tokens += [token.token_id for token in tokens]
            return 2 if 102 in cluster.tokens else None

        cluster.deliver = deliver
        task = cluster.start(make_request(max_tokens=9))
        decode, call = await cluster.prefilling("r")
        cluster.clock.advance(1.0)
        call.say(FIRST)
        await until(lambda: cluster.tokens)
        cluster.clock.advance(2.0)
        # What fails in the same moment is too late to matter.
        decode.update(token(1), token(2), token(3), RequestFailed("r", LINK_LOST))
        completion = await task
        assert completion.usage.num_output_tokens == 3
        assert completion.finish_reason is FinishReason.STOP
        assert completion.phases.decode_s == 2.0
        await cluster.nothing_is_left()


class TestALifeWithADeath:
    async def test_of_prefill_before_its_token(self, cluster):
        task = cluster.start(make_request(max_tokens=2))
        _, call = await cluster.prefilling("r")
        call.say(PeerLost("prefill-0:1", "killed"))
        decode, again = await cluster.prefilling("r~2")
        assert again.request.prompt_token_ids == tuple(range(6))
        again.say(FIRST, TRANSFER_REPORT, END)
        decode.update(token(1, request_id="r~2", done=DONE))
        completion = await task
        assert cluster.tokens == [100, 101]
        assert completion.request_id == "r"
        assert completion.prefill_worker == "prefill-1"
        assert completion.failures == ("prefill-0 to decode-0: prefill-0:1 was lost: killed",)
        await cluster.nothing_is_left()

    async def test_of_the_link_after_the_first_token(self, cluster):
        task = cluster.start(make_request(max_tokens=3, seed=5))
        decode, call = await cluster.prefilling("r")
        call.say(FIRST)
        await until(lambda: cluster.tokens)
        decode.update(RequestFailed("r", LINK_LOST))
        decode, again = await cluster.prefilling("r~2")
        # The prompt grew by what was emitted, so the draws keep their positions.
        assert again.request.prompt_token_ids == (*range(6), 100)
        assert (again.request.sampling.max_tokens, again.request.sampling.seed) == (2, 5)
        again.say(FIRST, TRANSFER_REPORT, END)
        decode.update(token(1, request_id="r~2", done=DONE))
        completion = await task
        assert cluster.tokens == [100, 100, 101]
        assert completion.prefill_worker == "prefill-1"
        usage = completion.usage
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (6, 3)
        assert usage.num_decode_cached_tokens + usage.num_transferred_tokens == 6
        assert cluster.counters.totals.num_failed_handoffs == 1
        await cluster.nothing_is_left()

    async def test_of_decode_in_the_middle_of_the_answer(self, cluster):
        task = cluster.start(make_request(max_tokens=5))
        decode, call = await cluster.prefilling("r")
        call.say(FIRST, TRANSFER_REPORT, END)
        decode.update(token(1), token(2))
        await until(lambda: len(cluster.tokens) == 3)
        cluster.clock.advance(2.0)
        decode.die()
        survivor, again = await cluster.prefilling("r~2")
        assert survivor is not decode
        assert again.request.prompt_token_ids == (*range(6), 100, 101, 102)
        again.say(FIRST, TRANSFER_REPORT, END)
        survivor.update(token(1, request_id="r~2", done=DONE))
        completion = await task
        assert cluster.tokens == [100, 101, 102, 100, 101]
        assert completion.phases.recovery_s == 2.0
        assert completion.usage.num_output_tokens == 5
        await cluster.nothing_is_left()

    async def test_of_prefill_after_decode_began_changes_nothing(self, cluster):
        task = cluster.start(make_request(max_tokens=3))
        decode, call = await cluster.prefilling("r")
        call.say(FIRST)
        decode.update(token(1))
        await until(lambda: len(cluster.tokens) == 2)
        call.say(PeerLost("prefill-0:1", "killed"))
        await until(lambda: cluster.dispatcher.num_prefill_calls == 0)
        decode.update(token(2, done=DONE))
        completion = await task
        assert cluster.tokens == [100, 101, 102]
        assert (completion.failures, completion.transfer) == ((), None)
        assert completion.usage.num_transferred_tokens == 2
        await cluster.nothing_is_left()

    async def test_of_anybody_after_the_last_token_changes_nothing(self, cluster):
        task = cluster.start(make_request(max_tokens=2))
        decode, call = await cluster.prefilling("r")
        call.say(FIRST)
        decode.update(token(1, done=DONE))
        await until(lambda: len(cluster.tokens) == 2)
        decode.die()
        assert (await task).usage.num_output_tokens == 2

    async def test_of_a_token_that_overtook_its_predecessor_is_made_again(self, cluster):
        task = cluster.start(make_request(max_tokens=3))
        decode, _ = await cluster.prefilling("r")
        decode.update(token(1))
        decode.update(RequestFailed("r", LINK_LOST))
        decode, again = await cluster.prefilling("r~2")
        assert again.request.prompt_token_ids == tuple(range(6))
        again.say(FIRST, TRANSFER_REPORT, END)
        decode.update(token(1, request_id="r~2"), token(2, request_id="r~2", done=DONE))
        await task
        assert cluster.tokens == [100, 101, 102]

    async def test_of_all_prefill_workers_is_made_up_for_at_decode(self, cluster):
        for prefill in cluster.prefills:
            prefill.die()
        await until(lambda: not cluster.fleet.members(Role.PREFILL))
        task = cluster.start(make_request(max_tokens=2))
        decode, command = await cluster.reserving("r")
        assert command.prefill_locally
        decode.update(reserved())
        decode.update(token(0, prefill=PREFILL_REPORT), token(1, done=DONE))
        completion = await task
        assert completion.usage.num_local_prefill_tokens == 2
        assert "no prefill worker can be used" in completion.placement
        await cluster.nothing_is_left()

    async def test_of_all_decode_workers_is_an_error_after_a_while(self, cluster):
        task = cluster.start(make_request())
        await cluster.reserving("r")
        for decode in cluster.decodes:
            decode.die()
        with pytest.raises(PeerLost, match="no decode worker can be used") as caught:
            await task
        assert "decode-0 was lost: killed" in str(caught.value.__cause__)

    async def test_of_all_decode_workers_but_one_that_comes_back(self, cluster, join):
        for decode in cluster.decodes:
            decode.die()
        await until(lambda: not cluster.fleet.members(Role.DECODE))
        task = cluster.start(make_request(max_tokens=1))
        await asyncio.sleep(0)
        cluster.decodes.append(await join("decode-2", incarnation="5"))
        _, call = await cluster.prefilling("r")
        call.say(FIRST)
        assert (await task).decode_worker == "decode-2"

    async def test_again_and_again_ends_with_the_last_error(self, cluster):
        task = cluster.start(make_request())
        for request_id in ("r", "r~2"):
            decode, _ = await cluster.prefilling(request_id)
            decode.update(RequestFailed(request_id, LINK_LOST))
        decode, command = await cluster.reserving("r~3")
        assert command.prefill_locally
        decode.update(RequestFailed("r~3", TwophaseError("the decode step failed: boom")))
        with pytest.raises(TwophaseError, match="boom"):
            await task
        await cluster.nothing_is_left()

    async def test_within_the_deadline_of_the_whole_request(self, cluster):
        request = make_request(deadline_s=cluster.clock.now_s() + 0.05)
        task = cluster.start(request)
        _, call = await cluster.prefilling("r")
        call.say(PeerLost("prefill-0:1", "killed"))
        await cluster.prefilling("r~2")
        with pytest.raises(DeadlineExceeded):
            await task
        await cluster.nothing_is_left()

    async def test_and_a_client_that_leaves_in_the_second_attempt(self, cluster):
        task = cluster.start(make_request())
        _, call = await cluster.prefilling("r")
        call.say(PeerLost("prefill-0:1", "killed"))
        await cluster.prefilling("r~2")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cluster.nothing_is_left()


class TestTheDecision:
    @pytest.mark.parametrize(
        "error",
        [InvalidRequest("prompt", "x", "y"), DeadlineExceeded("late"), Cancelled("gone")],
        ids=lambda error: type(error).__name__,
    )
    def test_what_no_other_worker_would_do_better_is_final(self, error):
        with pytest.raises(type(error)) as caught:
            Recovery(OnFailure.RESUME, 9).failed(Failure(error, is_from_prefill=True), PAIR)
        assert caught.value is error

    def test_with_on_failure_fail_the_first_error_is_final(self):
        recovery = Recovery(OnFailure.FAIL, 9)
        with pytest.raises(TransferFailed):
            recovery.failed(Failure(LINK_LOST, is_from_prefill=False), PAIR)
        assert not recovery.may_recompute

    @pytest.mark.parametrize(
        ("failure", "avoided"),
        [
            (Failure(LINK_LOST, is_from_prefill=False), "p"),
            (Failure(PeerLost("x", "y"), is_from_prefill=True), "p"),
            (Failure(PeerLost("x", "y"), is_from_prefill=False), "d"),
            (Failure(Overloaded("full"), is_from_prefill=False), "d"),
        ],
    )
    def test_the_worker_that_failed_is_avoided(self, failure, avoided):
        recovery = Recovery(OnFailure.RESUME, 9)
        recovery.failed(failure, PAIR)
        prefills = [PrefillLoad(i, i, LAYOUT, 0, 64, 16) for i in "pq"]
        decodes = [DecodeLoad(i, i, LAYOUT, 0, 4, 64, 16) for i in "de"]
        loads = recovery.may_use(Loads(prefills, decodes))
        expected = {"p": (["q"], ["d", "e"]), "d": (["p", "q"], ["e"])}[avoided]
        assert (
            [load.name for load in loads.prefill],
            [load.name for load in loads.decode],
        ) == expected

    @given(st.integers(1, 20), st.lists(st.booleans(), max_size=30))
    def test_there_are_never_more_attempts_than_allowed(self, max_attempts, sides):
        recovery = Recovery(OnFailure.RESUME, max_attempts)
        num_attempts = 0
        try:
            for is_from_prefill in sides:
                num_attempts += 1
                recovery.failed(Failure(LINK_LOST, is_from_prefill=is_from_prefill), PAIR)
        except TransferFailed:
            assert num_attempts == max_attempts
        assert num_attempts <= max_attempts


def test_workers_that_stop_in_order_use_up_no_attempts():
    recovery = Recovery(OnFailure.RESUME, 2)
    for _ in range(5):
        recovery.failed(Failure(PeerStopping("decode-0"), is_from_prefill=False), PAIR)
    recovery.failed(Failure(LINK_LOST, is_from_prefill=False), PAIR)
    with pytest.raises(TransferFailed):
        recovery.failed(Failure(LINK_LOST, is_from_prefill=False), PAIR)


@pytest.mark.parametrize("error", [LINK_LOST, PeerLost("decode-9", "killed")])
def test_a_kv_cache_that_could_not_be_fetched_uses_up_no_attempt(error):
    recovery = Recovery(OnFailure.RESUME, 1)
    recovery.failed(Failure(error, is_from_prefill=True), MOVE)
    assert recovery.failures
    recovery.failed(Failure(LINK_LOST, is_from_prefill=False), MOVE)
    with pytest.raises(PeerLost, match="decode-0"):
        recovery.failed(Failure(PeerLost("decode-0", "killed"), is_from_prefill=False), MOVE)


@given(
    st.text(st.characters(exclude_characters="~")), st.integers(1, 99), st.sampled_from(["", "0f-"])
)
def test_the_id_of_an_attempt_leads_back_to_the_request(request_id, attempt, mark):
    assert id_of_attempt(attempt_id(request_id, attempt, mark)) == request_id
