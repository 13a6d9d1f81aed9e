"""The simulated cluster: its models, its traces, and what scaling does in it."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from bench.simulate.__main__ import Load, best_static, best_static_near, config_of, play
from bench.simulate.cluster import Autoscaled, Simulation
from bench.simulate.machine import DECODE_MEASURED, PREFILL_MEASURED, fitted, not_negative
from bench.simulate.outcome import Outcome, Slo, num_turns
from bench.simulate.peers import HorizontalScaler, queue_length
from bench.simulate.report import draw, print_run, sparkline
from bench.simulate.trace import (
    Arrival,
    TraceBlocks,
    overlaid,
    poisson,
    read_trace,
    scaled,
    turning,
)
from core.config import load_config
from core.errors import ConfigError
from core.settings.scaling import DecodeScaling, PoolScaling
from deploy.autoscaler.record import ChangeRole, Start
from deploy.autoscaler.stage import Stage

TRACES = Path(__file__).parents[2] / "data" / "traces"
MACHINE = fitted()


def simulate(config, arrivals, machine=MACHINE):
    """A run with the autoscaler, and its records."""
    decide = Autoscaled(config)
    return Simulation(config, machine, decide=decide).run(arrivals), decide.records


class TestTheMachine:
    def test_whole_prompts_take_what_was_measured(self):
        for num_tokens, seconds in PREFILL_MEASURED:
            assert MACHINE.prefill_s(num_tokens, 0) == pytest.approx(seconds, rel=0.01)

    def test_chunks_add_up_to_the_whole(self):
        halves = MACHINE.prefill_s(512, 0) + MACHINE.prefill_s(512, 512)
        assert halves == pytest.approx(MACHINE.prefill_s(1024, 0))

    def test_decode_steps_take_what_was_measured_and_lie_on_lines_between(self):
        for num_sequences, seconds in DECODE_MEASURED:
            model_s = MACHINE.decode_s(num_sequences, num_sequences * 512)
            assert model_s == pytest.approx(seconds)
        (_, eight_s), (_, sixteen_s) = MACHINE.decode_steps_s[-2:]
        assert MACHINE.decode_s(12, 0) == pytest.approx((eight_s + sixteen_s) / 2)
        assert MACHINE.decode_s(24, 0) == pytest.approx(2 * sixteen_s - eight_s)
        alone = dataclasses.replace(MACHINE, decode_steps_s=((1, 0.5),))
        assert alone.decode_s(9, 0) == 0.5

    def test_no_coefficient_is_negative(self):
        odd = fitted(prefill=((100, 1.0), (200, 1.0)), decode=((1, 2.0), (8, 1e-9)))
        assert min(odd.prefill_token_s, odd.prefill_pair_s) >= 0
        assert min(seconds for _, seconds in odd.decode_steps_s) >= 0
        assert not_negative([(1, 1, -1), (1, 2, -2), (1, 3, -3)], [3, 5, 7]) == pytest.approx(
            (1, 2, 0)
        )

    def test_phases_on_one_host_slow_each_other_down_while_both_work(self):
        shared = dataclasses.replace(MACHINE, prefill_crowding=2.0, decode_crowding=3.0)
        arrivals = [Arrival(0.0, 16, 40), Arrival(0.5, 512, 1)]
        alone, beside = (
            Simulation(config_of(1, 1, 2), machine, decide=None).run(arrivals).trips
            for machine in (MACHINE, shared)
        )
        assert beside[1].ttft_s == pytest.approx(2 * alone[1].ttft_s)
        # Decode is slower while the second prompt is read, but for the step that ran as it came.
        lost_s = (beside[0].ended_s - alone[0].ended_s) / (1 - 1 / 3)
        assert lost_s == pytest.approx(beside[1].ttft_s, abs=3 * 2 * MACHINE.decode_s(1, 60))


class TestTraces:
    def test_azure_rows_are_times_and_lengths(self):
        found = read_trace(TRACES / "azure_code_head.csv", block_size=16)
        assert len(found) == 119
        assert found[0] == Arrival(0.0, 4808, 10)
        assert found[1].at_s == pytest.approx(0.052)

    def test_mooncake_blocks_become_the_clusters_and_keep_their_sharing(self):
        found = read_trace(TRACES / "mooncake_conversation_head.jsonl", block_size=16)
        assert len(found) == 60
        assert all(len(a.block_ids) == a.num_prompt_tokens // 16 for a in found)
        assert {a.block_ids[0] for a in found if a.block_ids} == {0}
        assert TraceBlocks(found[0]).hashes(16) == found[0].block_ids
        # Ten at the very same millisecond would test another thing.
        assert len({a.at_s for a in found}) == 60

    def test_a_trace_is_sped_up_repeated_and_cut(self):
        once = [Arrival(0.0, 1, 1, (7,)), Arrival(10.0, 2, 1, (8,))]
        twice = scaled(once, rate=2.0, num_requests=3)
        assert [a.at_s for a in twice] == [0.0, 5.0, 10.0]
        assert twice[2].block_ids != once[0].block_ids
        assert len(scaled(once, num_requests=1)) == 1

    def test_copies_begin_at_other_moments_of_the_same_hour_and_share_no_block(self):
        once = [Arrival(float(n), 100 + n, 1, (n,)) for n in range(50)]
        many = overlaid(once, 4)
        assert many == overlaid(once, 4) != overlaid(once, 4, seed=1)
        assert [a.at_s for a in many] == sorted(a.at_s for a in many)
        assert max(a.at_s for a in many) <= 50.0
        assert all(many.count(arrival) == 1 for arrival in once)
        lengths = Counter(a.num_prompt_tokens for a in many)
        assert set(lengths.values()) == {4}
        assert len({a.block_ids for a in many}) == len(many) == 200

    @pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{x"])
    def test_what_is_no_trace_is_refused(self, tmp_path, text):
        path = tmp_path / "trace"
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_trace(path, block_size=16)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(tmp_path / "none", block_size=16)


class TestARun:
    def test_one_request_takes_what_its_phases_take(self):
        config = config_of(1, 1, 2)
        run = Simulation(config, MACHINE, decide=None).run([Arrival(0.0, 1024, 11)])
        (trip,) = run.trips
        assert trip.ttft_s == pytest.approx(MACHINE.prefill_s(1024, 0))
        # Half of the prompt was on the link while the rest was read.
        exposed_s = 512 * 23_040 / MACHINE.link_bytes_per_s + MACHINE.link_latency_s
        assert trip.sealed_s - trip.first_token_s == pytest.approx(exposed_s)
        steps_s = sum(MACHINE.decode_s(1, 1024 + 1 + number) for number in range(10))
        assert trip.ended_s - trip.sealed_s == pytest.approx(steps_s)

    def test_an_answer_of_one_token_needs_no_step(self):
        run = Simulation(config_of(1, 1, 2), MACHINE, decide=None).run([Arrival(0.0, 16, 1)])
        assert run.trips[0].ended_s == run.trips[0].sealed_s
        assert run.trips[0].tpot_s is None

    def test_a_sequence_joins_after_the_step_that_runs(self):
        arrivals = [Arrival(0.0, 16, 200), Arrival(1.0, 16, 3)]
        run = Simulation(config_of(1, 1, 2), MACHINE, decide=None).run(arrivals)
        first, second = run.trips
        wait_s = second.first_decode_s - second.sealed_s
        assert 0 < wait_s <= MACHINE.decode_s(1, 220)
        assert second.ended_s < first.ended_s

    def test_the_same_trace_gives_the_same_run(self):
        arrivals = poisson(2.0, 120.0, 400, 40)
        config = config_of(2, 2, 4)
        first, second = (simulate(config, arrivals)[0] for _ in range(2))
        assert [t.ended_s for t in first.trips] == [t.ended_s for t in second.trips]
        assert first.worker_s == second.worker_s

    def test_cached_blocks_are_not_read_again(self):
        blocks = tuple(range(64))
        arrivals = [Arrival(0.0, 1024, 2, blocks), Arrival(60.0, 1024, 2, blocks)]
        run = Simulation(config_of(1, 1, 2), MACHINE, decide=None).run(arrivals)
        assert run.trips[1].ttft_s < run.trips[0].ttft_s / 10

    def test_a_request_that_fits_nowhere_is_given_up_and_told_why(self):
        run = Simulation(config_of(1, 1, 2), MACHINE, decide=None).run([Arrival(0.0, 9000, 10)])
        outcome = Outcome.of(run, Slo())
        assert (outcome.num_failed, outcome.attainment) == (1, 0.0)
        assert "9010 tokens" in next(iter(outcome.failures))

    def test_only_split_clusters_are_simulated(self):
        with pytest.raises(ConfigError, match="chunked is not simulated"):
            Simulation(load_config(None, ["mode=chunked"]), MACHINE, decide=None)


class TestScaling:
    def test_a_load_that_turns_moves_workers_and_loses_no_request(self):
        config = config_of(3, 3, 6)
        run, records = simulate(config, scaled(turning(900.0), rate=0.6))
        assert all(trip.ended_s is not None for trip in run.trips)
        half = [pair for when_s, pair in run.sizes if 300 < when_s < 600]
        assert half[0].prefill > half[0].decode
        last = run.sizes[-1][1]
        assert last.decode > last.prefill
        kinds = {type(action) for record in records for action in record.actions}
        assert {ChangeRole, Start} & kinds
        assert Outcome.of(run, Slo()).num_turns <= 4

    def test_a_throttled_link_grows_neither_pool(self):
        slow = dataclasses.replace(MACHINE, link_bytes_per_s=8e6)
        config = config_of(1, 1, 6)
        run, records = simulate(config, poisson(0.8, 300.0, 500, 8), slow)
        stages = [record.finding.stage for record in records]
        assert stages.count(Stage.LINK) > len(stages) / 2
        assert run.sizes[-1][1].prefill == run.sizes[-1][1].decode == 1

    @pytest.mark.case("B-138")
    def test_scaling_down_ends_nothing_that_runs(self):
        busy = poisson(3.0, 300.0, 500, 100)
        run, records = simulate(config_of(1, 1, 8), [*busy, Arrival(2000.0, 10, 2)])
        assert run.sizes[-1][1] == type(run.sizes[-1][1])(1, 1)
        assert max(pair.decode for _, pair in run.sizes) > 2
        assert not [trip for trip in run.trips if trip.failure]
        assert records

    @pytest.mark.case("B-140")
    def test_ten_rounds_of_sleep_and_wake_lose_no_request(self):
        config = config_of(1, 1, 4)
        scaling = config.scaling.model_copy(
            update={
                "prefill": PoolScaling(min_replicas=0),
                "decode": DecodeScaling(min_replicas=0),
                "idle_s": 60.0,
            }
        )
        config = config.model_copy(update={"scaling": scaling})
        run, _ = simulate(config, [Arrival(300.0 * round_, 64, 8) for round_ in range(10)])
        assert all(trip.ended_s is not None for trip in run.trips)
        assert sum(pair.decode == pair.prefill == 0 for _, pair in run.sizes) > 100
        # It waits for a start and a decision, at most.
        assert max(trip.ttft_s for trip in run.trips) < 20 + 5 + 1


class TestTheComparison:
    def test_a_static_split_is_found_and_runs_its_whole_budget(self):
        arrivals = poisson(1.5, 120.0, 1500, 16)
        best, outcome = best_static(arrivals, 4)
        assert best == 3  # long prompts, short answers
        assert outcome.num_turns == 0

    def test_the_split_of_a_large_budget_is_looked_for_near_that_of_a_tenth(self):
        load = Load("long prompts", poisson(5.0, 20.0, 1500, 16))
        best, outcome = best_static_near(load, 40)
        assert 25 <= best <= 35
        assert outcome.num_requests == len(load.of(40))

    def test_a_load_grows_with_the_budget_and_not_in_time(self):
        load = Load("any", poisson(5.0, 60.0, 100, 10))
        assert load.of(10) == scaled(load.arrivals)
        assert len(load.of(35)) == 4 * len(load.arrivals)  # 4 copies in 10/9 of the time
        assert max(a.at_s for a in load.of(35)) == pytest.approx(60 / 0.875, rel=0.05)

    def test_queue_length_scaling_goes_up_and_down(self):
        config = config_of(2, 2, 6)
        decide = HorizontalScaler(config.scaling, queue_length)
        outcome = play(config, poisson(2.0, 900.0, 800, 40), decide)
        assert outcome.num_requests > 1000

    def test_turns_are_changes_of_direction(self):
        assert num_turns([1, 2, 3, 3, 2, 2, 4, 4]) == 2
        assert num_turns([1, 1]) == 0


class TestTheReport:
    def test_a_run_is_told_with_its_decisions_and_drawn(self, tmp_path, capsys):
        config = config_of(1, 1, 4)
        run, records = simulate(config, poisson(2.0, 200.0, 600, 30))
        print_run(run, Outcome.of(run, Slo()), Slo(), records)
        told = capsys.readouterr().out
        assert "held back by" in told
        assert "worker-hours" in told
        path = tmp_path / "run.png"
        draw(run, path)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_bars_are_as_high_as_the_most_of_their_span(self):
        assert sparkline([0, 8, 4]) == " \u2588\u2584"
        assert len(sparkline(range(1000), 10)) == 10
