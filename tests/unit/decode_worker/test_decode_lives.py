"""Lives of a request at a decode worker, from its reservation to its last token."""

from dataclasses import replace

import pytest

from core.config import Mode
from core.errors import InvalidRequest, Overloaded
from core.events.event import Event, EventKind
from core.link import Begin, Granted, PieceAck, Sealed
from core.request import FinishReason
from core.timeline import DecodeReport, Gap, PrefillReport
from core.worker import DecodeDone, NewToken, Reserved
from decode_worker.worker import MAX_PASSED_S
from tests.unit.decode_worker.driver import (
    FIRST_TOKEN,
    World,
    assert_nothing_is_left,
    make_request,
)

LENGTH = FinishReason.LENGTH


def tokens_of(events):
    return [event.token_id for event in events if isinstance(event, NewToken)]


class TestARemotePrompt:
    def test_lives_from_reserve_to_its_last_token(self):
        world = World()
        link = world.link()
        # 1 decode reserves all that the request can ever need, and tells the prompt's blocks
        (reserved,) = world.reserve()
        assert isinstance(reserved, Reserved)
        assert len(reserved.reservation.block_ids) == 2
        assert world.pool.counts().used == 2
        assert (world.worker.census.num_reservations, world.worker.census.num_running) == (1, 0)
        # 2 the prefill worker begins
        epoch = reserved.reservation.epoch
        assert link.hear(Begin("r", epoch)) == (Granted("r", epoch),)
        # 3 pieces land in exactly the reserved blocks
        first, second = world.pieces()
        assert link.take(first).target_block_ids == reserved.reservation.block_ids
        assert link.said[-1] == PieceAck("r", epoch, 0)
        assert world.start_step() == []
        link.take(second)
        # 4 the Seal proves them
        world.now_s = 2.0
        assert link.seal() == (Sealed("r", epoch),)
        assert (world.worker.census.num_running, world.worker.handoffs.num_open) == (1, 0)
        told = world.worker.meter.signals(2.0, oldest_wait_s=0.0)
        assert (told.queue_wait_p95_s, told.step_s) == (0.0, None)
        # 5 each step takes the last token and gives the next
        world.now_s = 3.0
        (step,) = world.start_step()
        assert (step.token_ids, step.start) == ([FIRST_TOKEN], 6)
        world.now_s = 4.0
        world.end_step([step])
        assert world.events() == [NewToken("r", 107, 1)]
        assert world.worker.meter.signals(4.0, oldest_wait_s=0.0).step_s is not None
        # 6 the last one carries what was measured
        world.now_s = 5.0
        (step,) = world.step()
        assert (step.token_ids, step.start) == ([107], 7)
        gap = Gap(1, 1.0, 0.25, 1, 6, 0, ())
        sealed = Event(EventKind.SEALED, 2.0, 2.0)
        slot_wait = Event(EventKind.SLOT_WAIT, 2.0, 3.0)
        steps = Event(
            EventKind.STEPS,
            begin_s=3.0,
            end_s=5.0,
            index=1,
            count=2,
            busy_s=0.5,
            num_sequences=1,
            num_history_tokens=7,
        )
        report = DecodeReport(1.0, 2.0, 0.5, 1.0, 6.5, 0.0, gap, (sealed, slot_wait, steps))
        assert world.events() == [NewToken("r", 108, 2, DecodeDone(LENGTH, report))]
        assert_nothing_is_left(world)

    @pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"stop_token_ids": (FIRST_TOKEN,)}])
    def test_that_ends_with_its_first_token_is_over_with_the_seal(self, sampling):
        world = World()
        world.reserve(**sampling)
        world.link().hand_over()
        assert world.events() == []
        assert_nothing_is_left(world)

    def test_ends_at_a_stop_token(self):
        world = World()
        world.reserve(max_tokens=9, stop_token_ids=(108,))
        world.link().hand_over()
        world.run()
        *_, last = world.events()
        assert (last.token_id, last.done.finish_reason) == (108, FinishReason.STOP)
        assert_nothing_is_left(world)

    def test_whose_prefix_lies_here_is_shipped_in_part(self):
        world = World()
        link = world.link()
        world.reserve(make_request("a", 8))
        link.hand_over("a")
        (event,) = world.reserve(make_request("b", 8))
        reservation = event.reservation
        assert (reservation.num_shared_blocks, reservation.num_shared_tokens) == (1, 4)
        assert reservation.block_ids[0] == world.reservations["a"].block_ids[0]
        assert reservation.block_ids[1] != world.reservations["a"].block_ids[1]
        assert {piece.span.first_block for piece in world.pieces("b")} == {1}
        link.hand_over("b")
        world.run()
        assert_nothing_is_left(world)

    def test_batches_with_others_and_tells_each_router_its_own(self):
        world = World()
        link = world.link()
        for name, session in (("a", "s-a"), ("b", "s-b")):
            world.reservations[name] = world.reserve(
                make_request(name, first=ord(name)), session=session
            )[0].reservation
            link.hand_over(name, first_token=ord(name))
        assert [step.token_ids for step in world.step()] == [[97], [98]]
        assert [event.request_id for event in world.events("s-a")] == ["a"]
        assert [event.request_id for event in world.events("s-b")] == ["b"]
        world.run()
        assert_nothing_is_left(world)


class TestALocalPrompt:
    def test_is_read_in_chunks_beside_running_sequences(self):
        world = World(Mode.CHUNKED, budget=4)
        world.reserve(make_request("a", 3, max_tokens=8), is_local=True)
        world.step()
        assert tokens_of(world.events()) == [103]
        world.reserve(make_request("b", 5, first=50, max_tokens=2), is_local=True)
        assert world.worker.census.num_waiting_tokens == 5
        # a budget of 4: one for the running sequence, three for the prompt
        running, chunk = world.step()
        assert (running.start, chunk.token_ids, chunk.sampling) == (3, (50, 51, 52), None)
        world.now_s = 9.0
        _, chunk = world.step()
        assert (chunk.start, chunk.token_ids) == (3, (53, 54))
        token = next(e for e in world.events() if e.request_id == "b")
        assert (token.token_id, token.index) == (105, 0)
        chunks = token.prefill.events[1:]
        assert [(chunk.num_tokens, chunk.num_sequences) for chunk in chunks] == [(3, 1), (2, 1)]
        report = replace(token.prefill, events=())
        assert report == PrefillReport(8.5, 0.5, num_cached_tokens=0, num_chunks=2)
        world.run()
        assert_nothing_is_left(world)

    def test_is_read_whole_before_running_sequences_go_on(self):
        world = World(Mode.COLOCATED, budget=4)
        world.reserve(make_request("a", 3, max_tokens=8), is_local=True)
        world.step()
        world.reserve(make_request("b", 9, first=50), is_local=True)
        (whole,) = world.step()
        assert whole.token_ids == tuple(range(50, 59))
        assert [step.start for step in world.step()] == [3, 9]
        world.run()
        assert_nothing_is_left(world)

    def test_of_one_token_of_answer_is_over_with_its_prompt(self):
        world = World(Mode.CHUNKED)
        world.reserve(max_tokens=1, is_local=True)
        world.step()
        *_, token = world.events()
        assert token.done == DecodeDone(LENGTH, DecodeReport(0.0, 0.0))
        assert token.prefill is not None
        assert_nothing_is_left(world)

    def test_shares_the_prefix_that_lies_here(self):
        world = World(Mode.CHUNKED, budget=64)
        world.reserve(make_request("a", 9), is_local=True)
        world.run()
        world.reserve(make_request("b", 9), is_local=True)
        (step,) = world.step()
        assert (step.start, step.token_ids) == (8, (8,))
        *_, token = world.events()
        assert token.prefill.num_cached_tokens == 8
        world.run()
        assert_nothing_is_left(world)

    @pytest.mark.parametrize("mode", Mode)
    def test_is_read_in_every_mode(self, mode):
        world = World(mode)
        world.reserve(make_request("r", 11), is_local=True)
        world.run()
        assert tokens_of(world.events()) == [111, 112, 113]
        assert_nothing_is_left(world)


class TestWaitingForBlocks:
    def fill(self, world, name="big", num_tokens=29):
        world.reserve(make_request(name, num_tokens, first=200), is_local=True)

    def test_the_oldest_gets_them_first_when_they_are_free(self):
        world = World(Mode.CHUNKED, num_blocks=8, budget=64)
        self.fill(world)
        for name in ("a", "b"):
            assert world.reserve(make_request(name, 6, first=ord(name)), is_local=True) == []
        assert world.worker.census.num_waiting == 2
        world.cancel("big")
        granted = [e.request_id for e in world.events() if isinstance(e, Reserved)]
        assert granted == ["a", "b"]
        world.run()
        assert_nothing_is_left(world)

    def test_a_small_one_may_pass_a_big_one_for_a_while_and_then_no_more(self):
        world = World(Mode.CHUNKED, num_blocks=8, budget=1)
        self.fill(world, num_tokens=18)
        assert world.reserve(make_request("wide", 28, first=300), is_local=True) == []
        # 1 it is passed
        (event,) = world.reserve(make_request("a", 2, first=100, max_tokens=2), is_local=True)
        assert isinstance(event, Reserved)
        # 2 it is passed no more
        world.now_s = MAX_PASSED_S + 0.1
        assert world.reserve(make_request("b", 2, first=110, max_tokens=2), is_local=True) == []
        assert world.worker.census.num_waiting == 2
        # 3 its blocks come, then the others go on
        world.run(200)
        granted = [e.request_id for e in world.events() if isinstance(e, Reserved)]
        assert granted == ["wide", "b"]
        assert_nothing_is_left(world)

    def test_a_failed_step_lets_the_next_one_in_at_once(self):
        world = World(Mode.CHUNKED, num_blocks=8)
        self.fill(world)
        world.reserve(make_request("next", 6), is_local=True)
        world.start_step()
        world.worker.step_failed(Overloaded("boom"), world.now_s)
        granted = [e.request_id for e in world.events() if isinstance(e, Reserved)]
        assert granted == ["next"]
        world.cancel("next")
        assert_nothing_is_left(world)


class TestTheAudit:
    def held(self, world):
        holders = world.worker.holders(world.now_s)
        return {h.request_id: (h.state, h.num_blocks, h.epoch, h.age_s) for h in holders}

    def test_names_everybody_who_waits_or_holds_blocks_and_since_when(self):
        world = World(num_blocks=10)
        link = world.link()
        world.now_s = 5.0
        for name in ("running", "receiving", "fenced"):
            world.reserve(make_request(name, first=ord(name[0])))
            link.begin(name)
        link.push("running")
        link.seal("running")
        world.reserve(make_request("computing", first=300), is_local=True)
        world.reserve(make_request("waiting", 29, first=400))
        world.cancel("fenced")
        world.now_s = 8.0
        held = self.held(world)
        assert {name: (state, blocks) for name, (state, blocks, _, _) in held.items()} == {
            "running": ("running", 2),
            "receiving": ("receiving", 2),
            "computing": ("computing", 2),
            "waiting": ("waiting", 0),
            "fenced": ("quarantined", 2),
        }
        assert {age_s for _, _, _, age_s in held.values()} == {3.0}
        assert held["fenced"][2] == world.reservations["fenced"].epoch
        assert held["waiting"][2] == 0
        for name in ("running", "receiving", "computing", "waiting"):
            world.cancel(name)
        link.lose()
        assert self.held(world) == {}
        assert_nothing_is_left(world)


class TestWhatIsRefused:
    def test_a_request_that_never_fits_the_context(self):
        world = World()
        error = world.reserve(num_tokens=40, max_tokens=9)[0].error
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.value) == ("max_tokens", "9")
        assert "may have 8: this worker holds 48 tokens" in error.limit
        assert_nothing_is_left(world)

    def test_a_request_that_never_fits_the_cache(self):
        world = World(num_blocks=2)
        error = world.reserve(num_tokens=9, max_tokens=1)[0].error
        assert "may have 0: this worker holds 8 tokens" in error.limit
        assert_nothing_is_left(world)

    def test_an_id_in_use_also_of_another_router_which_keeps_its_request(self):
        world = World()
        world.reserve()
        error = world.reserve(session="other")[0].error
        assert (error.field, error.limit) == ("request_id", "is in use")
        world.cancel("r", session="other")
        assert world.worker.census.num_known == 1
        world.cancel()
        assert_nothing_is_left(world)

    def test_one_more_than_may_wait(self):
        world = World(num_blocks=8, max_waiting=2)
        for name in ("big", "a", "b"):
            world.reserve(make_request(name, 28, first=ord(name[0])))
        error = world.reserve(make_request("c", 28))[0].error
        assert isinstance(error, Overloaded)
        assert "2 requests wait for KV blocks" in str(error)
        for name in ("big", "a", "b"):
            world.cancel(name)
        assert_nothing_is_left(world)
