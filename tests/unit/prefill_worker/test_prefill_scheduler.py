"""The budget of a step is never exceeded, nobody starves, and short prompts pass a long one."""

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import Candidate, Scheduler, Share

remainders = st.lists(st.integers(1, 5000), max_size=12)
budgets = st.integers(1, 1024)


def candidates_of(remaining):
    return [Candidate(f"r{place}", tokens) for place, tokens in enumerate(remaining)]


def run(scheduler, prompts, *, arrivals=()):
    """Steps until nothing is left: each step's shares; `arrivals` join one per step."""
    left, arrivals, steps = dict(prompts), list(arrivals), []
    while left or arrivals:
        if arrivals:
            left.update([arrivals.pop(0)])
        shares = scheduler.schedule([Candidate(*item) for item in left.items()])
        assert shares
        for share in shares:
            left[share.request_id] -= share.num_tokens
            assert left[share.request_id] >= 0
        left = {request_id: tokens for request_id, tokens in left.items() if tokens}
        steps.append({share.request_id: share.num_tokens for share in shares})
    return steps


def ends(steps):
    """Number of the step in which each prompt was done, from 1."""
    return {request_id: number for number, step in enumerate(steps, 1) for request_id in step}


@given(remainders, budgets)
def test_a_step_fills_its_budget_and_never_exceeds_it(remaining, budget):
    shares = Scheduler(budget).schedule(candidates_of(remaining))
    num_tokens = sum(share.num_tokens for share in shares)
    assert num_tokens == min(budget, sum(remaining))
    assert all(share.num_tokens >= 1 for share in shares)


@given(remainders, budgets)
def test_shares_come_in_the_order_of_the_candidates_each_at_most_once(remaining, budget):
    candidates = candidates_of(remaining)
    shares = Scheduler(budget).schedule(candidates)
    places = [int(share.request_id[1:]) for share in shares]
    assert places == sorted(set(places))
    assert all(
        share.num_tokens <= remaining[place] for share, place in zip(shares, places, strict=True)
    )


@given(remainders, budgets)
def test_the_same_candidates_get_the_same_shares(remaining, budget):
    candidates = candidates_of(remaining)
    assert Scheduler(budget).schedule(candidates) == Scheduler(budget).schedule(candidates)


@given(remainders.filter(bool), budgets)
def test_the_oldest_is_sure_of_half_of_the_budget(remaining, budget):
    first, *_ = Scheduler(budget).schedule(candidates_of(remaining))
    assert first.request_id == "r0"
    assert first.num_tokens >= min(remaining[0], -(-budget // 2))


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.integers(1, 64),
    st.lists(st.integers(1, 64), max_size=200),
)
def test_nobody_starves_however_many_short_prompts_arrive(waiting, budget, arrivals):
    prompts = {f"w{place}": tokens for place, tokens in enumerate(waiting)}
    steps = run(
        Scheduler(budget),
        prompts,
        arrivals=[(f"a{place}", tokens) for place, tokens in enumerate(arrivals)],
    )
    done, bound = ends(steps), 0
    for place, tokens in enumerate(waiting):
        bound += -(-tokens // -(-budget // 2))
        assert done[f"w{place}"] <= bound


def test_short_prompts_pass_a_long_one():
    shorts = {f"short-{place}": 10 for place in range(20)}
    done = ends(run(Scheduler(512), {"long": 4000} | shorts))
    num_long_steps = done["long"]
    assert max(done[name] for name in shorts) < num_long_steps / 4


def test_a_late_short_prompt_waits_one_step_at_most_behind_any_number_of_long_ones():
    scheduler = Scheduler(512)
    candidates = [Candidate(f"long-{place}", 4000) for place in range(8)]
    shares = scheduler.schedule([*candidates, Candidate("short", 10)])
    assert shares == (Share("long-0", 256), Share("long-1", 246), Share("short", 10))


def test_a_lone_prompt_takes_the_whole_budget():
    assert Scheduler(512).schedule([Candidate("r", 4000)]) == (Share("r", 512),)
    assert Scheduler(1).schedule(candidates_of([5, 5])) == (Share("r0", 1),)


def test_without_candidates_there_is_nothing_to_do():
    assert Scheduler(512).schedule([]) == ()
