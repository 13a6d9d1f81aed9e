"""Cases of autoscaling, played with requests from their arrival to their end."""

import pytest

from bench.simulate.__main__ import config_of
from bench.simulate.cluster import Autoscaled, Simulation
from bench.simulate.machine import fitted
from bench.simulate.trace import Arrival, poisson
from core.worker import Role
from deploy.autoscaler.facts import Life
from deploy.autoscaler.fit import Pair
from deploy.autoscaler.record import Drain
from deploy.autoscaler.stage import Stage


@pytest.mark.case("B-135")
def test_many_refused_requests_leave_nothing_that_keeps_the_pools_up():
    config = config_of(1, 1, 6)
    router = config.router.model_copy(update={"max_queued_requests": 4})
    config = config.model_copy(update={"router": router})
    decide = Autoscaled(config)
    simulation = Simulation(config, fitted(), decide=decide)
    flood = [Arrival(number * 0.05, 400, 40) for number in range(1200)]
    run = simulation.run([*flood, Arrival(1000.0, 10, 2)])
    assert sum(bool(trip.failure) for trip in run.trips) > 300
    assert max(pair.decode + pair.prefill for _, pair in run.sizes) > 3
    assert run.sizes[-1][1] == Pair(1, 1)
    quiet = next(record for record in decide.records if record.now_s > 900)
    assert (quiet.demand.num_in_line, quiet.demand.requests_per_s) == (0, 0.0)
    assert all(pool.view.num_running == pool.view.num_waiting == 0 for pool in quiet.pools)
    assert simulation._door._knowledge.ledger.is_empty


@pytest.mark.case("B-136")
def test_two_minutes_of_short_prompts_and_long_answers_grow_decode_alone():
    config = config_of(1, 1, 8)
    decide = Autoscaled(config)
    # 5 answers of 1,000 tokens in two seconds; one worker has 16 slots.
    arrivals = [Arrival(number * 0.4, 10, 1000) for number in range(300)]
    run = Simulation(config, fitted(), decide=decide).run(arrivals)
    assert {pair.prefill for when_s, pair in run.sizes if when_s <= 120} == {1}
    assert max(pair.decode for when_s, pair in run.sizes if when_s <= 120) >= 4
    late = {record.finding.stage for record in decide.records if 30 < record.now_s <= 120}
    assert Stage.DECODE in late
    assert Stage.PREFILL not in late


@pytest.mark.case("B-138")
def test_shrinking_both_pools_to_one_ends_no_stream_and_no_queued_prompt():
    drained = {}

    def decide(facts, now_s):
        if now_s < 10 or drained:
            return ()
        for role in Role:
            names = [w.name for w in facts.workers if w.role is role and w.life is Life.SERVING]
            drained.update(dict.fromkeys(names[1:], now_s))
        return (Drain(tuple(drained)),)

    streams = [Arrival(number * 0.1, 16, 700) for number in range(20)]
    prompts = [Arrival(9.5 + number * 0.01, 1024, 4) for number in range(20)]
    after = poisson(1.0, 30.0, 100, 10)
    late = [Arrival(11.0 + a.at_s, a.num_prompt_tokens, a.num_output_tokens) for a in after]
    config = config_of(3, 3, 6)
    run = Simulation(config, fitted(), decide=decide).run([*streams, *prompts, *late])
    assert len(drained) == 4
    assert not [trip.failure for trip in run.trips if trip.failure]
    moved = [trip for trip in run.trips[:20] if trip.lease.placement.decode in drained]
    assert moved
    assert min(trip.ended_s for trip in moved) > 30  # they ran on where they were
    for trip in run.trips:
        names = {trip.lease.placement.prefill, trip.lease.placement.decode}
        assert trip.placed_s <= 10 or not names & set(drained)
    # Each leaves when it is empty: the last ones with their last streams.
    assert run.worker_s > 2 * run.ended_s + 4 * 10
