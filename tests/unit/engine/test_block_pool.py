"""The block pool against a naive model, and the rules that the model does not state."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import InvariantBroken
from engine.block_pool import BlockCounts, BlockPool

BLOCK_SIZE = 2
NUM_BLOCKS = 7
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=3 * BLOCK_SIZE + 1)


def test_fresh_blocks_bear_the_epoch_of_their_reservation_and_epochs_rise():
    pool = BlockPool(4, BLOCK_SIZE)
    first, second = pool.reserve(2), pool.reserve(1)
    assert first.epoch < second.epoch
    assert {pool.epoch_of(b) for b in first.block_ids} == {first.epoch}
    pool.release(first.block_ids)
    third = pool.reserve(3)
    assert third.epoch > second.epoch
    assert set(first.block_ids) < set(third.block_ids)
    assert {pool.epoch_of(b) for b in third.block_ids} == {third.epoch}


def test_a_refused_reservation_changes_nothing():
    pool = BlockPool(3, BLOCK_SIZE)
    held = pool.reserve(1)
    pool.publish([5, 6], held.block_ids, 2)
    pool.release(held.block_ids)
    shared = pool.match_prefix([5, 6, 7])
    before = pool.counts()
    assert pool.reserve(3, shared=shared) is None
    assert pool.counts() == before
    assert pool.match_prefix([5, 6, 7]) == shared


def test_a_match_never_covers_the_last_token_and_only_full_blocks():
    pool = BlockPool(4, BLOCK_SIZE)
    held = pool.reserve(2)
    pool.publish([1, 2, 3, 4], held.block_ids, 4)
    assert pool.match_prefix([1, 2, 3, 4]) == [held.block_ids[0]]
    assert pool.match_prefix([1, 2, 3, 4, 5]) == list(held.block_ids)
    assert pool.match_prefix([1, 2]) == []
    assert pool.match_prefix([]) == []


def test_only_blocks_below_the_computed_length_are_published():
    pool = BlockPool(4, BLOCK_SIZE)
    held = pool.reserve(2)
    pool.publish([1, 2, 3, 4], held.block_ids, 3)
    assert pool.match_prefix([1, 2, 3, 4, 5]) == [held.block_ids[0]]


def test_equal_tokens_after_different_beginnings_are_different_prefixes():
    pool = BlockPool(4, BLOCK_SIZE)
    held = pool.reserve(2)
    pool.publish([1, 1, 9, 9], held.block_ids, 4)
    assert pool.match_prefix([2, 2, 9, 9, 0]) == []


def test_the_tail_of_a_released_prefix_is_reused_before_its_head():
    pool = BlockPool(3, BLOCK_SIZE)
    held = pool.reserve(3)
    pool.publish([1, 2, 3, 4, 5, 6], held.block_ids, 6)
    pool.release(held.block_ids)
    assert pool.reserve(1).block_ids == held.block_ids[2:]
    assert pool.match_prefix([1, 2, 3, 4, 5, 6, 7]) == list(held.block_ids[:2])


def test_blocks_without_a_prefix_are_reused_before_cached_ones():
    pool = BlockPool(2, BLOCK_SIZE)
    cached, plain = pool.reserve(1), pool.reserve(1)
    pool.publish([1, 2], cached.block_ids, 2)
    pool.release(cached.block_ids)
    pool.release(plain.block_ids)
    assert pool.reserve(1).block_ids == plain.block_ids


def test_a_shared_block_keeps_its_epoch_and_lives_until_its_last_holder_leaves():
    pool = BlockPool(4, BLOCK_SIZE)
    first = pool.reserve(1)
    pool.publish([1, 2], first.block_ids, 2)
    second = pool.reserve(1, shared=pool.match_prefix([1, 2, 3]))
    assert second.block_ids[0] == first.block_ids[0]
    assert second.num_shared == 1
    assert second.fresh_block_ids == second.block_ids[1:]
    assert pool.epoch_of(first.block_ids[0]) == first.epoch
    pool.release(first.block_ids)
    assert pool.counts().used == 2
    pool.release(second.block_ids)
    assert pool.counts() == BlockCounts(total=4, free=4, cached=1, used=0, quarantined=0)


def test_a_quarantined_block_is_out_of_reach_until_lifted():
    pool = BlockPool(2, BLOCK_SIZE)
    held = pool.reserve(2)
    pool.publish([1, 2, 3, 4], held.block_ids, 4)
    pool.quarantine(held.block_ids)
    assert pool.counts() == BlockCounts(total=2, free=0, cached=0, used=0, quarantined=2)
    assert pool.match_prefix([1, 2, 3, 4, 5]) == []
    assert pool.reserve(1) is None
    with pytest.raises(InvariantBroken, match="cannot be published"):
        pool.publish([1, 2], held.block_ids, 2)
    with pytest.raises(InvariantBroken, match="cannot be shared"):
        pool.reserve(0, shared=held.block_ids)
    pool.lift_quarantine(held.block_ids)
    assert pool.reserve(2) is not None


def test_misuse_is_found_at_once():
    pool = BlockPool(3, BLOCK_SIZE)
    held = pool.reserve(1)
    pool.release(held.block_ids)
    for misuse in (pool.release, pool.quarantine, pool.lift_quarantine):
        with pytest.raises(InvariantBroken):
            misuse(held.block_ids)
    other = pool.reserve(1)
    pool.publish([1, 2], other.block_ids, 2)
    pool.reserve(0, shared=other.block_ids)
    with pytest.raises(InvariantBroken, match="other holders"):
        pool.quarantine(other.block_ids)
    with pytest.raises(InvariantBroken, match="other tokens"):
        pool.publish([3, 4], other.block_ids, 2)
    with pytest.raises(InvariantBroken, match="twice"):
        pool.reserve(0, shared=other.block_ids * 2)
    with pytest.raises(ValueError, match="empty"):
        BlockPool(0, BLOCK_SIZE)


def test_forgotten_prefixes_are_found_no_more_and_can_be_published_again():
    pool = BlockPool(2, BLOCK_SIZE)
    held = pool.reserve(1)
    pool.publish([1, 2], held.block_ids, 2)
    pool.forget_prefixes()
    assert pool.match_prefix([1, 2, 3]) == []
    pool.publish([1, 2], held.block_ids, 2)
    assert pool.match_prefix([1, 2, 3]) == list(held.block_ids)


class PoolMachine(RuleBasedStateMachine):
    """Random lives of blocks; the naive model keeps what each block holds, by plain token lists."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.held = []  # (tokens, block table, fresh blocks), one per sequence
        self.quarantined = []
        self.content = {}  # block -> the tokens up to its end, if published
        self.last_epoch = 0

    def reachable(self, tokens):
        """Length of the longest published prefix, in blocks, by looking at every block."""
        known = {tuple(c) for c in self.content.values()}
        num = 0
        while (num + 1) * BLOCK_SIZE < len(tokens) and (
            tuple(tokens[: (num + 1) * BLOCK_SIZE]) in known
        ):
            num += 1
        return num

    @rule(tokens=TOKENS, share=st.booleans())
    def reserve(self, tokens, share):
        shared = self.pool.match_prefix(tokens)
        assert len(shared) == self.reachable(tokens)
        for index, block in enumerate(shared):
            assert self.content[block] == tokens[: (index + 1) * BLOCK_SIZE]
        if not share:
            shared = []
        num_fresh = -(-len(tokens) // BLOCK_SIZE) - len(shared)
        busy = {b for _, table, _ in self.held for b in table} | set(self.quarantined)
        has_room = num_fresh <= NUM_BLOCKS - len(busy | set(shared))
        before = self.pool.counts()
        reservation = self.pool.reserve(num_fresh, shared=shared)
        assert (reservation is not None) == has_room
        if reservation is None:
            assert self.pool.counts() == before
            return
        assert reservation.epoch > self.last_epoch
        self.last_epoch = reservation.epoch
        assert list(reservation.block_ids[: reservation.num_shared]) == shared
        assert not set(reservation.fresh_block_ids) & (busy | set(shared))
        for block in reservation.fresh_block_ids:
            assert self.pool.epoch_of(block) == reservation.epoch
            self.content.pop(block, None)
        self.held.append((tokens, reservation.block_ids, reservation.fresh_block_ids))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data):
        tokens, table, _ = data.draw(st.sampled_from(self.held))
        num_tokens = data.draw(st.integers(0, len(tokens)))
        self.pool.publish(tokens, table, num_tokens)
        for index in range(num_tokens // BLOCK_SIZE):
            prefix = tokens[: (index + 1) * BLOCK_SIZE]
            if prefix not in self.content.values():
                self.content[table[index]] = prefix

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index)[1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def abort(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, table, fresh = self.held[index]
        others = {b for i, (_, t, _) in enumerate(self.held) if i != index for b in t}
        if others & set(fresh):
            return
        self.held.pop(index)
        self.pool.quarantine(fresh)
        self.pool.release(table[: len(table) - len(fresh)])
        self.quarantined += fresh
        for block in fresh:
            self.content.pop(block, None)

    @precondition(lambda self: self.quarantined)
    @rule()
    def lift(self):
        self.pool.lift_quarantine(self.quarantined)
        self.quarantined = []

    @rule()
    def forget(self):
        self.pool.forget_prefixes()
        self.content = {}

    @invariant()
    def every_block_is_in_one_place(self):
        used = {b for _, table, _ in self.held for b in table}
        assert self.pool.counts() == BlockCounts(
            total=NUM_BLOCKS,
            free=NUM_BLOCKS - len(used) - len(self.quarantined),
            cached=len(set(self.content) - used),
            used=len(used),
            quarantined=len(self.quarantined),
        )

    def teardown(self):
        for _, table, _ in self.held:
            self.pool.release(table)
        self.pool.lift_quarantine(self.quarantined)
        assert self.pool.counts().free == NUM_BLOCKS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolAgainstANaiveModel = PoolMachine.TestCase
