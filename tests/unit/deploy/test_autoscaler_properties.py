"""What holds for every decision, whatever the facts."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.settings.scaling import DecodeScaling, PoolScaling, ScalingConfig
from core.worker import Role
from deploy.autoscaler.autoscaler import tick
from deploy.autoscaler.facts import ClusterFacts, Life
from deploy.autoscaler.fit import Pair, fit, is_allowed
from deploy.autoscaler.history import Noted, PoolHistory, State
from deploy.autoscaler.stage import Stage
from tests.unit.deploy.scaling_facts import (
    NOW_S,
    Plant,
    Run,
    after,
    decode,
    demand_of,
    prefill,
    scaling_of,
)

LIVES = st.sampled_from([Life.SERVING, Life.SERVING, Life.STARTING, Life.DRAINING])
WAITS = st.sampled_from([0.0, 0.1, 5.0])


@st.composite
def scalings(draw):
    least = draw(st.integers(0, 2))
    bounds = {"min_replicas": least, "max_replicas": draw(st.integers(max(least, 1), 6))}
    try:
        return ScalingConfig(
            prefill=PoolScaling(**bounds, cost=draw(st.sampled_from([0.5, 1, 2]))),
            decode=DecodeScaling(**bounds),
            min_ratio=draw(st.sampled_from([0.0, 0.5])),
            max_ratio=draw(st.sampled_from([1.0, 4.0])),
            budget=draw(st.sampled_from([None, 4.0, 7.5])),
            grow_after_s=10.0,
            shrink_after_s=10.0,
            cooldown_s=draw(st.sampled_from([0.0, 30.0])),
            role_change=draw(st.booleans()),
        )
    except ValueError:
        assume(False)


@st.composite
def workers(draw):
    found = []
    for number in range(draw(st.integers(0, 6))):
        heard_s = draw(st.sampled_from([NOW_S, NOW_S - 60, None]))
        common = {"life": draw(LIVES), "heard_s": heard_s, "oldest_wait_s": draw(WAITS)}
        if draw(st.booleans()):
            link = {"bytes_per_s": 9e6, "max_bytes_per_s": 1e7} if draw(st.booleans()) else {}
            found.append(
                prefill(
                    f"p{number}",
                    num_waiting=draw(st.integers(0, 9)),
                    num_queued_tokens=draw(st.integers(0, 20_000)),
                    num_in_flight_bytes=draw(st.sampled_from([0, 50_000_000])),
                    **link,
                    **common,
                )
            )
        else:
            found.append(
                decode(
                    f"d{number}",
                    num_running=draw(st.integers(0, 16)),
                    num_waiting=draw(st.integers(0, 3)),
                    kv_use=draw(st.floats(0, 1)),
                    step_s=draw(st.sampled_from([None, 0.01, 0.3])),
                    **common,
                )
            )
    return tuple(found)


HISTORIES = st.builds(
    PoolHistory,
    needs=st.tuples(
        st.builds(
            Noted,
            at_s=st.just(NOW_S - 11),
            num_needed=st.one_of(st.none(), st.integers(0, 9)),
            num_ample=st.one_of(st.none(), st.integers(0, 9)),
        )
    ),
    grown_s=st.sampled_from([NOW_S - 5, NOW_S - 100]),
    shrunk_s=st.sampled_from([NOW_S - 5, NOW_S - 100]),
    held_until_s=st.sampled_from([NOW_S - 5, NOW_S + 5]),
    spared_s=st.sampled_from([NOW_S - 5, NOW_S - 5000]),
    learned_s=st.sampled_from([0.0, 15.0]),
)
DEMANDS = st.builds(
    demand_of,
    requests_per_s=st.floats(0, 20),
    decode_s=st.floats(0.1, 60),
    num_in_line=st.integers(0, 5),
    oldest_in_line_s=WAITS,
    idle_s=st.sampled_from([0.0, 1e5]),
)


def decided(record):
    target = {pool.role: pool.after for pool in record.pools}
    return Pair(target[Role.PREFILL], target[Role.DECODE])


def _drained_cost(scaling, staff):
    draining = [w for w in staff if w.life is Life.DRAINING]
    return sum(scaling.cost(w.role is Role.PREFILL, w.role is Role.DECODE) for w in draining)


@settings(max_examples=100, deadline=None)
@given(scalings(), workers(), DEMANDS, st.builds(State, prefill=HISTORIES, decode=HISTORIES))
def test_a_decision_keeps_bounds_budget_and_ratio(scaling, staff, demand, state):
    record, _ = tick(scaling, ClusterFacts(staff, demand), NOW_S, state)
    drained_cost = _drained_cost(scaling, staff)
    is_blocked = fit(scaling, Pair(1, 1), drained_cost=drained_cost) is None
    # Where nothing is allowed before those that drain are gone, nothing is done meanwhile.
    is_same = all(pool.before == pool.after for pool in record.pools)
    is_kept = is_allowed(scaling, decided(record), drained_cost=drained_cost)
    assert is_kept or (is_blocked and is_same)


@settings(max_examples=100, deadline=None)
@given(scalings(), workers(), DEMANDS, st.builds(State, prefill=HISTORIES, decode=HISTORIES))
def test_prefill_grows_only_where_it_is_late_or_the_ratio_asks(scaling, staff, demand, state):
    record, _ = tick(scaling, ClusterFacts(staff, demand), NOW_S, state)
    pool = after(record, Role.PREFILL)
    if record.finding.stage in (Stage.LINK, Stage.DECODE) and pool.after > pool.before > 0:
        least = scaling.prefill_range(after(record, Role.DECODE).after).start
        assert pool.after == least


@settings(max_examples=100, deadline=None)
@given(scalings(), workers(), DEMANDS, st.builds(State, prefill=HISTORIES, decode=HISTORIES))
def test_nobody_is_left_without_a_worker_for_whom_one_may_be_started(scaling, staff, demand, state):
    record, _ = tick(scaling, ClusterFacts(staff, demand), NOW_S, state)
    is_asked = demand.num_in_line > 0 or demand.requests_per_s > 0
    has_budget_now = (
        fit(scaling, Pair(1, 1), drained_cost=_drained_cost(scaling, staff)) is not None
    )
    # Idle for long and yet somebody in line cannot be: the router counts who waits as not idle.
    if is_asked and demand.idle_s < scaling.idle_s and has_budget_now:
        assert decided(record).prefill > 0
        assert decided(record).decode > 0


LOADS = (st.floats(0.1, 10), st.floats(0.5, 10), st.tuples(st.integers(1, 6), st.integers(1, 6)))


def sizes_under_constant_load(scaling, rate, decode_s, staff, random):
    """Workers of each pool after each of sixty decisions about a load that only noise changes."""
    plant = Plant(Run(scaling))
    for role, number in zip((Role.PREFILL, Role.DECODE), staff, strict=True):
        for _ in range(number):
            plant.add(role, Life.SERVING)
    for _ in range(60):
        noise = random.uniform(0.93, 1.07)
        plant.step(demand_of(rate * noise, decode_s=decode_s), noise)
    return [[after(record, role).after for record in plant.run.records] for role in Role]


def changes_of(numbers):
    """At which decision a pool changed, and by how much."""
    pairs = enumerate(zip(numbers, numbers[1:], strict=False), start=1)
    return [(tick, b - a) for tick, (a, b) in pairs if b != a]


def num_turns(numbers):
    """How often a pool grew after it had shrunk, or shrank after it had grown."""
    steps = [step for _, step in changes_of(numbers)]
    return sum((a > 0) != (b > 0) for a, b in zip(steps, steps[1:], strict=False))


@settings(max_examples=8, deadline=None)
@given(*LOADS, st.randoms())
def test_under_constant_load_no_pool_goes_up_and_down(rate, decode_s, staff, random):
    for numbers in sizes_under_constant_load(scaling_of(), rate, decode_s, staff, random):
        assert num_turns(numbers) <= 1, numbers


@settings(max_examples=8, deadline=None)
@given(*LOADS, st.sampled_from([4.0, 7.0]), st.randoms())
def test_under_a_spent_budget_no_pool_turns_within_its_cool_down(
    rate, decode_s, staff, budget, random
):
    scaling = scaling_of(budget=budget)
    for numbers in sizes_under_constant_load(scaling, rate, decode_s, staff, random):
        changes = changes_of(numbers)
        for (tick_a, a), (tick_b, b) in zip(changes, changes[1:], strict=False):
            is_turn = (a > 0) != (b > 0)
            waited_s = (tick_b - tick_a) * scaling.interval_s
            assert not is_turn or waited_s >= scaling.cooldown_s, numbers


@settings(max_examples=8, deadline=None)
@given(*LOADS, st.sampled_from([4.0, 7.0]), st.randoms())
def test_under_a_spent_budget_no_pool_turns_more_than_three_times_in_sixty_decisions(
    rate, decode_s, staff, budget, random
):
    # Into the budget, to what the load needs, and one exchange that noise asked for and took back.
    for numbers in sizes_under_constant_load(
        scaling_of(budget=budget), rate, decode_s, staff, random
    ):
        assert num_turns(numbers) <= 3, numbers


@settings(max_examples=8, deadline=None)
@given(st.floats(6.3, 9), st.floats(28, 31), LOADS[2], st.randoms())
def test_where_both_pools_are_too_small_none_turns_more_than_three_times_in_sixty_decisions(
    rate, num_busy_slots, staff, random
):
    # Loads at which the decode pool needs now two and now three workers, and prefill five or six.
    decode_s = num_busy_slots / rate
    for numbers in sizes_under_constant_load(scaling_of(budget=4.0), rate, decode_s, staff, random):
        assert num_turns(numbers) <= 3, numbers
