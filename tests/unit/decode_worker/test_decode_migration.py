"""An answer that leaves its decode worker: it is held, its KV cache is read, and it ends once."""

import pytest

from core.errors import DeadlineExceeded, PeerStopping, TransferFailed, TransferFailure
from core.worker import Held, NewToken, RequestFailed
from tests.unit.decode_worker.driver import World, assert_nothing_is_left, make_request

MOVE = "move-0"


def running(world, **changes):
    """A request of 6 prompt tokens that has its first token, which its prefill made."""
    request = make_request(**{"max_tokens": 9} | changes)
    world.reserve(request)
    world.link().hand_over()
    world.events()
    return request


def going_on(world, request_id="r", *, request_id_there="r~2"):
    """What another worker is asked to go on with."""
    sequence = world.worker._sequences[request_id]
    rest = sequence.request.resumed(sequence.output_token_ids, 2)
    assert rest.request_id == request_id_there
    return rest


def held(world):
    """A request that is held with two tokens."""
    running(world)
    world.step()
    world.worker.hold("session-0", "r", world.now_s)
    assert world.events()[-1] == Held("r")
    return going_on(world)


class TestHolding:
    def test_between_steps_it_is_told_at_once_and_no_token_follows(self):
        world = World()
        running(world)
        world.worker.hold("session-0", "r", world.now_s)
        assert world.events() == [Held("r")]
        assert world.start_step() == []
        assert (world.worker.census.num_running, world.worker.census.num_runnable) == (1, 0)
        world.cancel()
        assert_nothing_is_left(world)

    def test_in_a_step_its_token_is_told_first(self):
        world = World()
        running(world)
        steps = world.start_step()
        world.worker.hold("session-0", "r", world.now_s)
        assert world.events() == []
        world.end_step(steps)
        token, last = world.events()
        assert (type(token), last) == (NewToken, Held("r"))
        assert world.start_step() == []
        world.cancel()
        assert_nothing_is_left(world)

    def test_only_its_own_session_may_and_once_is_enough(self):
        world = World()
        running(world)
        world.worker.hold("session-1", "r", world.now_s)
        assert len(world.step()) == 1
        assert all(isinstance(said, NewToken) for said in world.events())
        for _ in range(2):
            world.worker.hold("session-0", "r", world.now_s)
        assert world.events() == [Held("r")]
        world.cancel()
        assert_nothing_is_left(world)

    @pytest.mark.parametrize("is_local", [True, False])
    def test_one_that_has_no_whole_kv_cache_is_given_up(self, is_local):
        world = World(budget=4)
        world.reserve(is_local=is_local)
        world.worker.hold("session-0", "r", world.now_s)
        assert type(world.error()) is PeerStopping
        world.worker.settle(world.now_s)
        assert_nothing_is_left(world)

    def test_the_last_token_ends_it_and_nothing_is_held(self):
        world = World()
        running(world, max_tokens=2)
        steps = world.start_step()
        world.worker.hold("session-0", "r", world.now_s)
        world.end_step(steps)
        (token,) = world.events()
        assert token.done is not None
        assert_nothing_is_left(world)


class TestShipping:
    def test_its_next_token_goes_to_who_ships_it_and_its_blocks_stay(self):
        world = World()
        request = held(world)
        block_ids = world.worker.ship(MOVE, "r", request)
        world.step()
        (token, _) = world.events(MOVE)
        assert (token.index, token.token_id) == (2, 100 + request.num_prompt_tokens)
        assert world.start_step() == []
        world.cancel()  # the router's word counts no more
        (holder,) = world.worker.holders(world.now_s)
        assert (holder.state, holder.num_blocks) == ("pushing", len(block_ids))
        world.worker.shipped(MOVE, world.now_s)
        world.worker.shipped(MOVE, world.now_s)
        assert world.events() == []
        assert_nothing_is_left(world)

    def test_an_answer_that_ends_with_that_token_keeps_its_blocks_until_it_is_shipped(self):
        world = World()
        running(world, max_tokens=2)
        world.worker.hold("session-0", "r", world.now_s)
        world.worker.ship(MOVE, "r", going_on(world))
        world.step()
        assert world.events(MOVE)[0].done is not None
        assert (world.worker.census.num_known, world.worker.census.num_reservations) == (1, 0)
        assert world.pool.counts().used > 0
        world.worker.shipped(MOVE, world.now_s)
        assert_nothing_is_left(world)

    @pytest.mark.parametrize("is_step_first", [True, False])
    def test_blocks_that_a_step_and_a_handoff_use_wait_for_both(self, is_step_first):
        world = World()
        request = held(world)
        world.worker.ship(MOVE, "r", request)
        steps = world.start_step()
        world.lose_session(MOVE)
        ends = [lambda: world.end_step(steps), lambda: world.worker.shipped(MOVE, world.now_s)]
        first, last = ends if is_step_first else reversed(ends)
        first()
        assert world.pool.counts().used > 0
        last()
        assert_nothing_is_left(world)

    def test_its_deadline_is_told_to_who_ships_it(self):
        world = World()
        running(world, deadline_s=20.0)
        world.worker.hold("session-0", "r", world.now_s)
        world.worker.ship(MOVE, "r", going_on(world))
        world.pass_s(20.0)
        assert type(world.error(MOVE)) is DeadlineExceeded
        world.worker.shipped(MOVE, world.now_s)
        assert_nothing_is_left(world)

    def test_what_a_worker_that_ends_hands_back_is_told_to_who_ships_it(self):
        world = World()
        request = held(world)
        world.worker.ship(MOVE, "r", request)
        world.worker.hand_back(world.now_s)
        assert isinstance(world.events(MOVE)[-1], RequestFailed)
        world.worker.shipped(MOVE, world.now_s)
        assert_nothing_is_left(world)

    def test_is_refused_for_what_is_not_held_or_has_other_tokens_or_is_shipped_already(self):
        world = World()
        running(world)
        request = going_on(world)
        self.refuses(world, "r", request)  # it runs
        world.worker.hold("session-0", "r", world.now_s)
        self.refuses(world, "other", request)
        self.refuses(world, "r", make_request("r~2", 7))
        world.worker.ship(MOVE, "r", request)
        self.refuses(world, "r", request)
        world.worker.shipped(MOVE, world.now_s)
        assert_nothing_is_left(world)

    def refuses(self, world, held_id, request):
        with pytest.raises(TransferFailed) as caught:
            world.worker.ship("move-1", held_id, request)
        assert caught.value.reason is TransferFailure.REFUSED
