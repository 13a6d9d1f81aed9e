"""Large pools: whom placement looks at, and that it decides as well as if it looked at all."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Mode
from router.placing.knowledge import Asked, Knowledge
from router.placing.load import REQUESTS_PER_SLOT, DecodeLoad, Loads, Need, PrefillLoad
from router.placing.placement import Placement, Reason, Rules, place
from router.placing.prefix_index import MAX_HOLDERS, PrefixIndex, PromptBlocks
from router.placing.shortlist import FEW, NUM_DRAWN, Shortlist
from tests.unit.router.doubles import LAYOUT

SPLIT = Rules(Mode.DISAGGREGATED)
NEED = Need(num_prompt_tokens=40, num_tokens=50)
SLOTS = 4


def pools(num_workers):
    prefill = [PrefillLoad(f"p{n}", f"p{n}", LAYOUT, 0, 400, 100) for n in range(num_workers)]
    decode = [
        DecodeLoad(f"d{n}", f"d{n}", LAYOUT, 0, SLOTS, 400, 100_000) for n in range(num_workers)
    ]
    return Loads(prefill, decode)


def prompt(seed):
    return PromptBlocks([seed * 1000 + n for n in range(NEED.num_prompt_tokens)])


class Router:
    """Knowledge of one fleet, asked as the line asks."""

    def __init__(self, loads):
        self.knowledge = Knowledge(0.0)
        self.loads = loads
        self.seen = []

    def ask(self, seed, need=NEED, session="", loads=None):
        def decide(seen):
            self.seen.append(seen)
            return place(SPLIT, need, seen.prefill, seen.decode)

        blocks = prompt(seed)
        asked = Asked(blocks, session)
        outcome, seen = self.knowledge.place(decide, loads or self.loads, asked)
        if isinstance(outcome, Placement):
            return outcome, self.knowledge.begin(outcome, need, blocks, seen, session)
        return outcome, None


def test_of_a_small_pool_all_are_looked_at():
    loads = pools(FEW).prefill
    assert Shortlist().of(loads, ()) is loads


def test_of_a_large_one_some_and_those_that_are_asked_for():
    loads = pools(500).decode
    names = {load.name for load in Shortlist().of(loads, {"d499", "nobody"})}
    assert "d499" in names
    assert len(names) <= NUM_DRAWN + 1
    assert names <= {load.name for load in loads}


@settings(max_examples=25)
@given(st.integers(1, FEW), st.lists(st.integers(0, 5), max_size=40))
def test_small_pools_decide_as_if_there_were_no_short_list(num_workers, seeds):
    router = Router(pools(num_workers))
    for seed in seeds:
        outcome, _ = router.ask(seed)
        seen = router.seen.pop()
        assert (len(seen.prefill), len(seen.decode)) == (num_workers, num_workers)
        assert not router.seen
        assert outcome == place(SPLIT, NEED, seen.prefill, seen.decode)


@settings(max_examples=5, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whoever_fits_somewhere_is_placed_however_few_have_room(random):
    router = Router(pools(FEW + 20))
    leases = []
    for number in range(REQUESTS_PER_SLOT * SLOTS * (FEW + 20)):
        outcome, lease = router.ask(number)
        assert lease is not None, outcome
        router.knowledge.ledger.read(lease.work)
        leases.append(lease)
    outcome, lease = router.ask(5000)
    assert (lease, outcome.reason) == (None, Reason.FULL)
    gone = random.choice(leases)
    router.knowledge.ledger.end(gone.work)
    outcome, lease = router.ask(5001)
    assert outcome.decode == gone.placement.decode


def test_load_is_even_though_few_are_looked_at():
    """Mitzenmacher's d choices: the fullest of 300 has little more than the mean of 2."""
    loads = pools(300)
    roomy = [dataclasses.replace(load, max_num_sequences=64) for load in loads.decode]
    router = Router(Loads(loads.prefill, roomy))
    for number in range(600):
        _, lease = router.ask(number)
        router.knowledge.ledger.read(lease.work)
    numbers = [router.knowledge.ledger.num_sequences(load.name) for load in roomy]
    # Up to eight more than the emptiest are a like load, so the choice is among all that are drawn.
    assert max(numbers) <= 10
    assert len(router.seen) == 600


def test_a_prompt_finds_its_blocks_and_a_session_its_worker_among_hundreds():
    router = Router(pools(300))
    first, lease = router.ask(1, session="s")
    router.knowledge.ledger.read(lease.work)
    for number in range(2, 30):
        router.knowledge.ledger.read(router.ask(number)[1].work)
    of_session, lease = router.ask(99, session="s")
    assert of_session.decode == first.decode
    router.knowledge.ledger.end(lease.work)
    again, _ = router.ask(1)
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert "cached" in again.why


def test_a_request_that_only_one_of_hundreds_can_hold_finds_it():
    loads = pools(300)
    decode = [dataclasses.replace(d, max_num_tokens=45) for d in loads.decode[:-1]]
    router = Router(Loads(loads.prefill, [*decode, loads.decode[-1]]))
    outcome, _ = router.ask(1)
    assert outcome.decode == loads.decode[-1].name


class TestHolders:
    def test_those_that_have_most_of_a_prompt_are_told(self):
        index = PrefixIndex()
        index.note("a", PromptBlocks(range(8)), 4, 100)
        index.note("b", PromptBlocks(range(16)), 4, 100)
        assert index.holders(PromptBlocks(range(20)), 4) == ("b",)
        assert set(index.holders(PromptBlocks(range(8)), 4)) == {"a", "b"}
        assert index.holders(PromptBlocks(range(5, 20)), 4) == ()

    def test_no_more_than_some_are_remembered(self):
        index = PrefixIndex()
        for number in range(2 * MAX_HOLDERS):
            index.note(f"w{number}", PromptBlocks(range(4)), 4, 100)
        holders = index.holders(PromptBlocks(range(4)), 4)
        assert len(holders) == len(set(holders)) == MAX_HOLDERS
        assert holders[0] == f"w{2 * MAX_HOLDERS - 1}"

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=60))
    def test_a_holder_has_the_block_and_nothing_of_the_gone_is_left(self, notes):
        index = PrefixIndex()
        for worker, seed in notes:
            index.note(worker, PromptBlocks(range(seed, seed + 8)), 4, num_blocks=6)
            for block, holders in index._holders.items():
                assert all(block in index._blocks[holder] for holder in holders)
        index.keep({"a"})
        assert {h for holders in index._holders.values() for h in holders} <= {"a"}
        index.keep(())
        assert not index._holders
