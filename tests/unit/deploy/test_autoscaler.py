"""Single decisions of the autoscaler, on a manual clock."""

import json
import math
from dataclasses import replace

import pytest

from core.settings.scaling import DecodeScaling, PoolScaling
from core.worker import Role
from deploy.autoscaler.facts import Life, LinkView, PoolView
from deploy.autoscaler.history import Noted, PoolHistory, State
from deploy.autoscaler.queueing import mean_wait_s, servers_for
from deploy.autoscaler.record import ChangeRole, Drain, GiveUp, Start
from deploy.autoscaler.stage import Stage
from deploy.autoscaler.wish import Rule
from tests.unit.deploy.scaling_facts import (
    NOW_S,
    Plant,
    Run,
    after,
    decode,
    demand_of,
    prefill,
    scaling_of,
    worker,
)

ZERO = {
    "prefill": PoolScaling(min_replicas=0, max_replicas=8),
    "decode": DecodeScaling(min_replicas=0, max_replicas=8),
    "idle_s": 60.0,
}


def test_one_server_waits_as_pollaczek_and_khinchine_say():
    # 0.5 busy, service 2 s with variance 4 (scv 1): W = rho / (1 - rho) * S * (1 + scv) / 2.
    assert mean_wait_s(1, 0.25, 2.0, arrival_scv=1, scv=1) == pytest.approx(2.0)
    assert mean_wait_s(1, 0.25, 2.0, arrival_scv=1, scv=0) == pytest.approx(1.0)


def test_many_servers_wait_nearly_as_erlang_says():
    # M/M/8 at 0.9: Erlang C gives 0.7020 of arrivals a wait, so W = 0.7020 * S / (8 * 0.1).
    wait_s = mean_wait_s(8, 7.2, 1.0, arrival_scv=1, scv=1)
    assert wait_s == pytest.approx(0.7020 / 0.8, rel=0.05)
    assert mean_wait_s(8, 8.0, 1.0, arrival_scv=1, scv=1) == math.inf


def test_servers_are_the_fewest_that_meet_the_target():
    number = servers_for(0.1, 7.2, 1.0, arrival_scv=1, scv=1)
    waits = [mean_wait_s(n, 7.2, 1.0, arrival_scv=1, scv=1) for n in (number - 1, number)]
    assert waits[0] > 0.1 >= waits[1]
    assert servers_for(0.1, 0.0, 1.0, arrival_scv=1, scv=1) == 0


def test_late_prefill_grows_to_what_its_rates_need_and_says_why():
    run = Run(scaling_of())
    late = [prefill("p1", num_waiting=9, oldest_wait_s=3.0), decode("d1", num_running=4)]
    record = run.ticks(15, late, demand_of(requests_per_s=3.0))
    pool = after(record, Role.PREFILL)
    # 3 prompts/s of 0.5 s keep 1.5 busy; three workers bring the wait under 0.5 s.
    assert (pool.after, pool.rule) == (3, Rule.LATE)
    assert record.actions == (Start(Role.PREFILL, 2),)
    assert record.sentence.startswith(
        "held back by prefill: prefill 1 -> 3 (late): prompts wait 3.00 s (target 0.5 s); "
        "3.00 prompts/s of 500 tokens keep 1.50 workers of 1000 tokens/s busy; decode stays at 1"
    )


def test_a_record_can_be_written_as_json():
    record = Run(scaling_of(dry_run=True)).ticks(5, [prefill("p1"), decode("d1")], demand_of())
    written = json.loads(json.dumps(record.to_json()))
    assert written["finding"]["stage"] == "none"
    assert written["pools"][0]["role"] == "prefill"
    assert written["sentence"].endswith("(dry run: nothing is changed)")


@pytest.mark.case("B-136")
def test_prefill_does_not_grow_while_decode_holds_read_prompts():
    run = Run(scaling_of())
    parked = prefill(
        "p1", num_waiting=30, num_queued_tokens=20_000, oldest_wait_s=20.0, num_parked=20
    )
    full = decode("d1", num_running=16, num_waiting=9, oldest_wait_s=20.0)
    record = run.ticks(120, [parked, full], demand_of(decode_s=40.0))
    assert record.finding.stage is Stage.DECODE
    assert after(record, Role.PREFILL).rule is Rule.OTHER_STAGE
    assert after(record, Role.PREFILL).after == 1
    assert after(record, Role.DECODE).after > 1


def test_a_throttled_link_grows_neither_pool():
    run = Run(scaling_of())
    sender = prefill(
        "p1",
        num_waiting=30,
        oldest_wait_s=20.0,
        num_in_flight_bytes=50_000_000,
        bytes_per_s=9.5e6,
        max_bytes_per_s=10e6,
    )
    record = run.ticks(120, [sender, decode("d1", num_running=1)], demand_of(requests_per_s=9.0))
    assert record.finding.stage is Stage.LINK
    assert not any(each.actions for each in run.records)
    assert "KV bytes wait 5.00 s" in after(record, Role.PREFILL).why


def test_blocks_that_wait_for_a_late_link_are_no_reason_for_more_decode_workers():
    run = Run(scaling_of())
    late = {"num_in_flight_bytes": 50_000_000, "bytes_per_s": 9.5e6, "max_bytes_per_s": 10e6}
    full = decode("d1", num_running=16, kv_use=0.97, num_waiting=3, oldest_wait_s=20.0)
    demand = demand_of(requests_per_s=9.0, num_in_line=5, oldest_in_line_s=30.0)
    record = run.ticks(120, [prefill("p1", **late), full], demand)
    assert record.finding.stage is Stage.LINK
    assert not any(each.actions for each in run.records)
    # Two whose bytes came with others' wait for one of its 16 slots: decode's, if the link is well.
    busy = decode("d1", num_running=18, kv_use=0.97, num_waiting=3, oldest_wait_s=20.0)
    assert run.tick([prefill("p1", **late), busy], demand).finding.stage is Stage.LINK
    assert run.tick([prefill("p1"), busy], demand).finding.stage is Stage.DECODE


def test_idle_bytes_on_a_link_are_no_wait():
    slow = LinkView(num_in_flight_bytes=50_000_000, bytes_per_s=1e6, max_bytes_per_s=10e6)
    assert slow.wait_s == 5.0
    run = Run(scaling_of())
    sender = prefill("p1", num_in_flight_bytes=50_000_000, bytes_per_s=1e6, max_bytes_per_s=10e6)
    record = run.tick([sender, decode("d1")], demand_of())
    assert record.finding.stage is Stage.NONE


@pytest.mark.case("B-137")
def test_a_pool_is_the_sum_of_those_that_live():
    workers = [
        decode("d1", num_running=16, kv_use=0.8, step_s=0.05),
        *(decode(f"d{i}", num_running=0, kv_use=0.0, step_s=None) for i in (2, 3, 4)),
    ]
    view = PoolView.of(workers, heard_after_s=NOW_S - 10)
    assert (view.num_running, view.num_slots) == (16, 64)
    assert view.kv_use == pytest.approx(0.2)
    assert view.step_s == 0.05  # three measured none, which is not 0
    assert PoolView.of(workers[1:], heard_after_s=NOW_S - 10).num_running == 0


def test_what_is_stale_is_unknown_and_never_zero():
    run = Run(scaling_of(stale_after_s=10.0))
    silent = worker("d2", heard_s=None)
    workers = [prefill("p1"), decode("d1", num_running=1), silent, worker("d3", heard_s=None)]
    record = run.ticks(120, workers, demand_of())
    # One of three told its load: its pool neither grows nor shrinks.
    assert (after(record, Role.DECODE).after, after(record, Role.DECODE).rule) == (3, Rule.UNKNOWN)
    assert after(record, Role.DECODE).needed is None
    half = run.ticks(120, [*workers[:2], silent], demand_of())
    assert after(half, Role.DECODE).after == 2
    assert "1 of its workers have not told" in after(half, Role.DECODE).why


@pytest.mark.parametrize(
    ("kv_use", "num_in_line", "needed"),
    # Use alone says 3 of 2 workers, however many wait; at most as many again as are in use.
    [(0.97, 0, 3), (0.97, 10, 4), (0.97, 30, 5), (0.97, 300, 5), (0.85, 300, 2), (0.5, 300, 2)],
)
def test_where_blocks_are_short_those_that_wait_are_counted_as_those_that_hold_some(
    kv_use, num_in_line, needed
):
    busy = [decode(f"d{i}", num_running=5, num_reservations=10, kv_use=kv_use) for i in (1, 2)]
    late = prefill("p1", num_waiting=8, num_queued_tokens=9000, oldest_wait_s=5.0)
    line = {"num_in_line": num_in_line, "oldest_in_line_s": 4.0 if num_in_line else 0.0}
    demand = demand_of(requests_per_s=0.5, decode_s=0.1, **line)
    record = Run(scaling_of()).tick([late, *busy], demand)
    need = after(record, Role.DECODE)
    assert need.needed == needed
    words = f"{num_in_line} requests wait beside 20 that hold some"
    assert (words in need.why) == (needed > 3)


@pytest.mark.case("B-143")
@pytest.mark.parametrize("needs", [[2, 2, 2, 15, 2, 2], [10, 10, 15, 10, 10, 5]])
def test_one_value_decides_nothing(needs):
    run = Run(scaling_of(prefill=PoolScaling(max_replicas=64)))
    num_workers = needs[0]
    workers = [*(prefill(f"p{i}") for i in range(num_workers)), decode("d1")]
    for need in needs:
        # So many workers of 1,000 tokens/s are busy that `need` of them meet the target.
        busy = need - 0.9 if need < 5 else need - 2.5
        record = run.tick(workers, demand_of(requests_per_s=busy * 2, decode_s=0.1))
        pool = after(record, Role.PREFILL)
        assert abs(pool.needed - need) <= 1
        assert pool.after == num_workers


@pytest.mark.case("B-133")
@pytest.mark.parametrize("requests_per_s", [1.9, 3.3, 6.1])
def test_constant_load_at_a_threshold_makes_at_most_two_changes(requests_per_s):
    plant = Plant(Run(scaling_of()))
    plant.add(Role.PREFILL, Life.SERVING)
    plant.add(Role.DECODE, Life.SERVING)
    for number in range(120):
        noise = 1 + 0.1 * math.sin(number)
        plant.step(demand_of(requests_per_s * noise), noise)
    for role in Role:
        numbers = [after(record, role).after for record in plant.run.records]
        assert sum(a != b for a, b in zip(numbers, numbers[1:], strict=False)) <= 2


def bursts(plant, quiet_s, num):
    """How many prefill workers each burst finds; in a burst requests wait until there are four."""
    quiet = demand_of(requests_per_s=0.2)
    found = []
    for _ in range(num):
        found.append(plant.count(Role.PREFILL))
        for _ in range(20):
            is_late = plant.count(Role.PREFILL) < 4
            late = {"num_in_line": 1, "oldest_in_line_s": 4.0} if is_late else {}
            plant.step(demand_of(requests_per_s=6.0, **late))
        for _ in range(round(quiet_s / plant.run.scaling.interval_s)):
            plant.step(quiet)
    return found


def bursty_plant(**changes):
    plant = Plant(Run(scaling_of(**changes)))
    plant.add(Role.PREFILL, Life.SERVING)
    plant.add(Role.DECODE, Life.SERVING)
    return plant


def test_a_pool_keeps_workers_for_bursts_that_come_again_soon_after_they_left():
    plant = bursty_plant()
    first, second, *others = bursts(plant, quiet_s=150.0, num=5)
    assert (first, second) == (1, 1)
    assert min(others) >= 4
    assert bursts(bursty_plant(max_shrink_after_s=0.0), quiet_s=150.0, num=5) == [1] * 5
    # Bursts that do not come any more are forgotten.
    for _ in range(200):
        record = plant.step(demand_of(requests_per_s=0.2))
    assert plant.count(Role.PREFILL) == 1
    assert after(record, Role.PREFILL).rule is Rule.STEADY
    gone = [r for r in plant.run.records[-200:] if after(r, Role.PREFILL).rule is Rule.SPARE]
    unneeded_s = float(after(gone[0], Role.PREFILL).why.split()[-2])
    assert 150 < unneeded_s <= 500
    assert plant.run.state.prefill.learned_s == pytest.approx(unneeded_s / 2, abs=1)


def noted(history, num_ample, *, until_s, every_s=10.0):
    """With such needs from the last one on."""
    now_s = history.needs[-1].at_s if history.needs else -every_s
    while now_s < until_s:
        now_s += every_s
        history = history.noted(Noted(now_s, num_ample, num_ample), keep_s=2000.0)
    return history


def test_what_was_learned_fades_once_for_all_that_leave_until_the_pool_grows():
    history = PoolHistory(spared_s=50.0, grown_s=100.0, learned_s=800.0)
    history = noted(history, 1, until_s=1000.0)
    for number, now_s in enumerate((1000.0, 1060.0, 1120.0)):  # as a pool gives its workers up
        history = history.spared(9 - number, 800.0, now_s)
    assert history.learned_s == 400.0
    assert history.changed(1, 1200.0).spared(5, 400.0, 2000.0).learned_s == 200.0


def test_workers_that_left_one_after_the_other_were_not_needed_since_the_first_could_have_left():
    history = noted(PoolHistory(grown_s=0.0), 1, until_s=300.0)
    for num_left, now_s in ((3, 300.0), (2, 360.0), (1, 420.0)):
        history = noted(history, 1, until_s=now_s).spared(num_left, 300.0, now_s)
    assert history.missed(500.0, most_s=3600.0).learned_s == 2 * 500.0
    # Those that were needed after others had left: since then.
    history = noted(PoolHistory(grown_s=0.0), 3, until_s=300.0).spared(3, 300.0, 300.0)
    history = noted(history, 1, until_s=700.0).spared(2, 300.0, 700.0)
    assert history.missed(800.0, most_s=3600.0).learned_s == 2 * 400.0


def test_bursts_that_come_after_the_longest_time_teach_nothing():
    assert bursts(bursty_plant(max_shrink_after_s=100.0), quiet_s=250.0, num=4) == [1] * 4


def test_a_pool_keeps_what_a_somewhat_larger_load_would_need():
    # 2.6 workers of 1,000 tokens/s are busy: three or four meet the target, and one more of
    # a load that is larger by half.
    load = demand_of(requests_per_s=4.0)
    ends = []
    for share in (0.0, 0.5):
        plant = Plant(Run(scaling_of(hysteresis=share)))
        for role in (*[Role.PREFILL] * 7, Role.DECODE):
            plant.add(role, Life.SERVING)
        for _ in range(60):
            record = plant.step(load)
        ends.append(after(record, Role.PREFILL))
    tight, ample = ends
    assert tight.needed == ample.needed == tight.after
    assert ample.needed < ample.after < 7


@pytest.mark.parametrize(
    ("num_workers", "steps"), [(40, [(40, 36), (36, 33), (33, 30)]), (4, [(4, 3), (3, 2), (2, 1)])]
)
def test_a_tenth_of_a_pool_leaves_at_once_and_others_after_a_cool_down(num_workers, steps):
    scaling = scaling_of(prefill=PoolScaling(max_replicas=64), max_shrink_after_s=0.0)
    plant = Plant(Run(scaling))
    for _ in range(num_workers):
        plant.add(Role.PREFILL, Life.SERVING)
    plant.add(Role.DECODE, Life.SERVING)
    for _ in range(40):
        plant.step(demand_of(requests_per_s=0.2))
    shrunk = [r for r in plant.run.records if after(r, Role.PREFILL).rule is Rule.SPARE]
    left = [after(record, Role.PREFILL) for record in shrunk]
    assert [(step.before, step.after) for step in left[:3]] == steps
    times = [record.now_s for record in shrunk]
    gaps_s = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert min(gaps_s) >= scaling.cooldown_s
    cooling = [r for r in plant.run.records if after(r, Role.PREFILL).rule is Rule.COOLING]
    assert "it shrank less than 30 s ago" in after(cooling[-1], Role.PREFILL).why


@pytest.mark.case("B-130")
def test_after_a_burst_without_traffic_the_pools_go_back_to_the_minimum():
    plant = Plant(Run(scaling_of()))
    for _ in range(4):
        plant.add(Role.PREFILL, Life.SERVING)
        plant.add(Role.DECODE, Life.SERVING)
    nobody = replace(demand_of(), requests_per_s=0.0, num_prompt_tokens=None)
    for _ in range(15):  # shrink_after_s and one interval, and two for the clock's ends
        plant.step(nobody)
    assert (plant.count(Role.PREFILL), plant.count(Role.DECODE)) == (1, 1)


@pytest.mark.case("B-131")
def test_a_worker_that_cannot_start_is_given_up_and_freezes_nothing():
    plant = Plant(Run(scaling_of(start_timeout_s=40.0)), fails_to_start=frozenset({Role.PREFILL}))
    plant.add(Role.PREFILL, Life.SERVING)
    plant.add(Role.DECODE, Life.SERVING)
    for _ in range(14):
        plant.step(demand_of(requests_per_s=6.0))
    given_up = [a for r in plant.run.records for a in r.actions if isinstance(a, GiveUp)]
    assert given_up
    assert after(plant.run.records[-1], Role.PREFILL).rule is Rule.START_FAILED
    for _ in range(8):
        plant.step(demand_of(requests_per_s=6.0, decode_s=20.0))
    assert plant.count(Role.DECODE) >= 8
    nobody = replace(demand_of(), requests_per_s=0.0)
    for _ in range(16):
        plant.step(nobody)
    assert len(plant.workers) == 2


@pytest.mark.case("B-135")
def test_refused_requests_are_no_load():
    # Requests that were turned away are in no line and in no worker: nothing holds the pools up.
    run = Run(scaling_of())
    workers = [prefill("p1"), prefill("p2"), decode("d1"), decode("d2")]
    record = run.ticks(75, workers, replace(demand_of(), requests_per_s=0.0))
    assert {type(action) for each in run.records for action in each.actions} == {Drain}
    assert after(record, Role.DECODE).needed == 0


@pytest.mark.case("B-142")
def test_decisions_start_from_the_workers_that_are_there():
    run = Run(scaling_of())
    workers = [prefill("p1"), decode("d1"), decode("d2"), decode("d3")]
    busy = demand_of(requests_per_s=1.5, prompt=100.0, decode_s=20.0)
    run.ticks(20, workers, busy)
    killed = run.tick(workers[:2], busy)  # two were ended by hand
    assert after(killed, Role.DECODE).before == 1
    assert killed.actions == (Start(Role.DECODE, after(killed, Role.DECODE).after - 1),)
    added = run.tick([*workers, decode("d4")], busy)  # one was added by hand
    assert after(added, Role.DECODE).before == 4


@pytest.mark.case("B-140")
def test_an_idle_cluster_goes_to_nothing_and_the_first_request_wakes_both_pools():
    run = Run(scaling_of(**ZERO))
    nobody = replace(demand_of(), requests_per_s=0.0, idle_s=61.0)
    asleep = run.tick([prefill("p1"), decode("d1")], nobody)
    assert asleep.actions == (Drain(("p1", "d1")),)
    assert not run.tick([], nobody).actions
    asked = replace(demand_of(), requests_per_s=0.0, num_in_line=1, num_line_tokens=20)
    woken = run.tick([], asked)
    assert woken.actions == (Start(Role.PREFILL, 1), Start(Role.DECODE, 1))
    assert after(woken, Role.DECODE).rule is Rule.WAKE


def test_an_idle_cluster_stays_up_before_its_time():
    run = Run(scaling_of(**ZERO))
    nobody = replace(demand_of(), requests_per_s=0.0, idle_s=59.0)
    run.ticks(120, [prefill("p1"), decode("d1")], nobody)
    assert not any(record.actions for record in run.records)


def test_under_a_spent_budget_a_drained_worker_changes_its_role():
    run = Run(scaling_of(budget=4.0))
    workers = [prefill("p1"), prefill("p2"), decode("d1", num_running=16), decode("d2")]
    long_answers = demand_of(requests_per_s=1.0, prompt=100.0, decode_s=60.0)
    record = run.ticks(15, workers, long_answers)
    assert record.actions == (ChangeRole(("p1",), Role.DECODE),)
    assert after(record, Role.DECODE).rule is Rule.BUDGET
    assert "the budget of 4 is spent" in after(record, Role.PREFILL).why
    without = Run(scaling_of(budget=4.0, role_change=False)).ticks(15, workers, long_answers)
    assert without.actions == (Start(Role.DECODE, 1), Drain(("p1",)))


def test_noise_across_a_whole_worker_passes_none_to_and_fro_where_both_pools_are_too_small():
    plant = Plant(Run(scaling_of(budget=4.0)))
    for role, num_workers in ((Role.PREFILL, 3), (Role.DECODE, 1)):
        for _ in range(num_workers):
            plant.add(role, Life.SERVING)
    for number in range(120):
        noise = 0.95 if number % 8 < 4 else 1.05  # decode needs two workers, then three
        plant.step(demand_of(7.8 * noise, decode_s=3.7), noise)
    assert {after(record, Role.DECODE).needed for record in plant.run.records} == {2, 3}
    numbers = [after(record, Role.DECODE).after for record in plant.run.records]
    assert sum(a != b for a, b in zip(numbers, numbers[1:], strict=False)) <= 1


@pytest.mark.parametrize(("decode_s", "waits_s"), [(16.0, 60.0), (26.0, 10.0)])
def test_an_exchange_back_has_to_help_for_two_cool_downs_unless_it_halves_the_shortage(
    decode_s, waits_s
):
    turned = State(PoolHistory(grown_s=NOW_S - 100), PoolHistory(shrunk_s=NOW_S - 100))
    run = Run(scaling_of(budget=7.0), state=turned)
    workers = [*(prefill(f"p{i}") for i in range(4)), *(decode(f"d{i}") for i in range(3))]
    while not run.records or not run.records[-1].actions:
        held = run.records[-1].sentence if run.records else ""
        assert len(run.records) < 20, held
        run.tick(workers, demand_of(4.0, prompt=100.0, decode_s=decode_s))
    assert isinstance(run.records[-1].actions[0], ChangeRole)
    assert run.records[-1].now_s - NOW_S == waits_s
    assert ("an exchange back has to help for 60 s" in held) == (waits_s == 60.0)


def test_a_pool_whose_need_is_not_known_gives_nobody():
    run = Run(scaling_of(budget=4.0))
    unmeasured = [prefill("p1", tokens_per_s=None), prefill("p2", tokens_per_s=None)]
    workers = [*unmeasured, decode("d1", num_running=16), decode("d2")]
    record = run.ticks(15, workers, demand_of(requests_per_s=1.0, decode_s=60.0))
    assert record.actions == ()
    assert after(record, Role.DECODE).needed > 2


def test_a_worker_that_turns_counts_in_its_new_pool_and_is_not_started_twice():
    run = Run(scaling_of(budget=4.0))
    turning = prefill("p1", life=Life.DRAINING, becomes=Role.DECODE)
    workers = [turning, prefill("p2"), decode("d1", num_running=16), decode("d2")]
    record = run.ticks(15, workers, demand_of(requests_per_s=1.0, prompt=100.0, decode_s=60.0))
    assert after(record, Role.DECODE).before == 3
    assert record.actions == ()


def test_the_ratio_pulls_prefill_along():
    run = Run(scaling_of(min_ratio=0.5))
    workers = [prefill("p1"), decode("d1", num_running=16), decode("d2", num_running=16)]
    record = run.ticks(15, workers, demand_of(requests_per_s=1.0, prompt=10.0, decode_s=60.0))
    assert after(record, Role.DECODE).after == 5
    assert (after(record, Role.PREFILL).after, after(record, Role.PREFILL).rule) == (3, Rule.BOUNDS)


@pytest.mark.case("B-138")
def test_the_emptiest_workers_are_drained_and_those_that_start_before_them():
    run = Run(scaling_of())
    busy = [decode(f"d{i}", num_running=i) for i in (3, 1, 2)]
    nobody = replace(demand_of(), requests_per_s=0.1, decode_s=demand_of(decode_s=1.0).decode_s)
    run.ticks(75, [prefill("p1"), *busy], nobody)
    drained = [a for each in run.records for a in each.actions]
    assert drained[0] == Drain(("d1",))
    starting = worker("d9", life=Life.STARTING, heard_s=None, since_s=NOW_S + 50)
    num_before = len(run.records)
    run.ticks(60, [prefill("p1"), *busy[:1], starting], nobody)
    drained = [a for each in run.records[num_before:] for a in each.actions]
    assert drained[0] == Drain(("d9",))


def test_slow_steps_are_the_stage_of_decode_and_add_no_worker_for_one_stream():
    run = Run(scaling_of(decode=DecodeScaling(max_replicas=8, target_step_s=0.05)))
    slow = [prefill("p1"), decode("d1", num_running=12, step_s=0.09)]
    record = run.ticks(15, slow, demand_of())
    assert record.finding.stage is Stage.DECODE
    assert after(record, Role.DECODE).after == 2
    alone = Run(run.scaling).ticks(
        60, [prefill("p1"), decode("d1", num_running=1, step_s=0.5)], demand_of(decode_s=0.1)
    )
    assert after(alone, Role.DECODE).after == 1
