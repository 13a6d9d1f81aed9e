"""Faults in the simulated cluster: what is lost is recovered as the router would."""

import dataclasses

import pytest

from bench.simulate.__main__ import config_of
from bench.simulate.cluster import Autoscaled, Simulation
from bench.simulate.fault import Faults
from bench.simulate.machine import fitted
from bench.simulate.outcome import Outcome, Slo
from bench.simulate.report import print_run
from bench.simulate.trace import Arrival, poisson
from core.errors import ConfigError
from core.settings.router import OnFailure
from core.settings.scaling import ScalingConfig
from core.worker import Role
from deploy.autoscaler.record import GiveUp

MACHINE = fitted()


def run_with(texts, arrivals, config=None, *, seed=0, decide=None):
    config = config or config_of(2, 2, 8)
    faults = Faults.parse(texts, seed=seed)
    simulation = Simulation(config, MACHINE, decide=decide, faults=faults)
    run = simulation.run(arrivals)
    # Nothing is left: no lease, and no worker that holds something.
    assert simulation._door.demand.num_in_line == 0
    assert simulation._door._knowledge.ledger.is_empty
    assert not simulation._inside
    for role in Role:
        for model in simulation._fleet.serving(role):
            assert model.num_requests == 0
    return run


class TestLostWorkers:
    def test_an_answer_goes_on_elsewhere_with_what_was_emitted_in_its_prompt(self):
        config = config_of(1, 2, 4)
        arrivals = [Arrival(0.0, 512, 100)]
        whole = run_with([], arrivals, config).trips[0]
        (trip,) = run_with(["lost:decode@3"], arrivals, config).trips
        assert trip.num_attempts in (1, 2)  # the one that was drawn may have been the idle one
        lost = [run_with(["lost:decode@3"], arrivals, config, seed=s).trips[0] for s in range(4)]
        resumed = [trip for trip in lost if trip.num_attempts == 2]
        assert 0 < len(resumed) < 4
        for trip in resumed:
            num_emitted = trip.arrival.num_prompt_tokens - 512
            assert 20 < num_emitted < 60
            assert trip.arrival.num_output_tokens == 100 - num_emitted
            assert trip.ttft_s == whole.ttft_s  # the client had it before
            again_s = trip.first_token_s - 3.0
            assert again_s == pytest.approx(MACHINE.prefill_s(512 + num_emitted, 0), rel=0.01)
            assert whole.ended_s < trip.ended_s < whole.ended_s + again_s + 0.5

    def test_a_prompt_whose_reader_is_lost_is_read_by_another(self):
        config = config_of(1, 1, 2)
        (trip,) = run_with(["lost:prefill@0.5"], [Arrival(0.0, 2048, 3)], config).trips
        assert trip.num_attempts == 2
        # The only one: it is started again first.
        assert trip.ttft_s == pytest.approx(0.5 + 20 + MACHINE.prefill_s(2048, 0))

    def test_every_request_of_a_busy_cluster_survives_random_losses(self):
        arrivals = poisson(1.5, 600.0, 500, 60)
        run = run_with(["lost:10/h"], arrivals)
        outcome = Outcome.of(run, Slo())
        assert outcome.num_failed == 0
        assert outcome.num_lost_workers > 3
        assert outcome.num_resumed > 3
        assert len({at_s for at_s, _ in run.losses}) == len(run.losses)
        again = run_with(["lost:10/h"], arrivals)
        assert [t.ended_s for t in again.trips] == [t.ended_s for t in run.trips]
        assert run_with(["lost:10/h"], arrivals, seed=1).losses != run.losses

    def test_who_may_not_be_resumed_ends_with_the_error(self):
        config = config_of(1, 1, 2)
        router = config.router.model_copy(update={"on_failure": OnFailure.FAIL})
        config = config.model_copy(update={"router": router})
        (trip,) = run_with(["lost:decode@3"], [Arrival(0.0, 512, 100)], config).trips
        assert "it was lost" in trip.failure

    def test_scaling_counts_a_lost_worker_as_one_that_starts(self):
        config = config_of(1, 1, 4)
        decide = Autoscaled(config)
        run = run_with(["lost:decode@60"], poisson(0.3, 200.0, 300, 20), config, decide=decide)
        assert {pair.decode for when_s, pair in run.sizes if when_s < 120} == {1}
        assert not [trip for trip in run.trips if trip.failure]


class TestOtherFaults:
    def test_a_slow_link_delays_the_second_token_and_only_while_it_is_slow(self):
        arrivals = [Arrival(0.0, 512, 3), Arrival(100.0, 512, 3), Arrival(200.0, 512, 3)]
        trips = run_with(["link:0.001@90-150"], arrivals).trips
        exposed_s = [trip.sealed_s - trip.first_token_s for trip in trips]
        assert exposed_s[0] == pytest.approx(exposed_s[2])
        slow_s = 512 * 23_040 / (MACHINE.link_bytes_per_s * 0.001)
        assert exposed_s[1] == pytest.approx(slow_s, rel=0.01)

    @pytest.mark.case("B-131")
    def test_a_pool_that_cannot_start_is_given_up_and_the_other_goes_on(self):
        config = config_of(1, 1, 8)
        scaling = ScalingConfig(**{**dict(config.scaling), "start_timeout_s": 60.0})
        config = config.model_copy(update={"scaling": scaling})
        decide = Autoscaled(config)
        long = poisson(2.0, 300.0, 2000, 8)
        answers = [dataclasses.replace(a, at_s=a.at_s + 300) for a in poisson(3.0, 300.0, 50, 150)]
        run = run_with(["start:prefill@0-300"], [*long, *answers], config, decide=decide)
        assert any(isinstance(a, GiveUp) for r in decide.records for a in r.actions)
        assert max(pair.decode for when_s, pair in run.sizes if when_s > 300) > 2
        assert all(trip.ended_s is not None or trip.failure for trip in run.trips)


@pytest.mark.parametrize(
    "text", ["lost", "lost:router@3", "link:0@1-2", "link:2@1-2", "start:decode@9-3", "lost:x/h"]
)
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(ConfigError, match="--fault"):
        Faults.parse([text])


def test_the_report_tells_of_losses(capsys):
    run = run_with(["lost:decode@3"], [Arrival(0.0, 512, 100)] * 4)
    print_run(run, Outcome.of(run, Slo()), Slo(), ())
    assert "workers lost, requests resumed" in capsys.readouterr().out
