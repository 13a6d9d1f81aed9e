"""What telemetry costs is told against turns without it, beside what the machine does by itself."""

import pytest

from bench import telemetry
from bench.telemetry import Round, Turn


def turn(seconds, cpu_s):
    return Turn(100, seconds, cpu_s)


def test_a_machine_that_gets_slower_is_noise_and_no_cost():
    slower = Round(turn(10.0, 8.0), turn(11.0, 8.8), turn(12.0, 9.6))

    def seconds(one):
        return 1 / one.tokens_per_s

    def cpu(one):
        return one.cpu_per_token_s

    assert slower.cost(seconds) == pytest.approx(0.0)
    assert slower.noise(seconds) == pytest.approx(0.2)
    assert slower.cost(cpu) == pytest.approx(0.0)


def test_the_report_takes_medians_and_sets_the_direct_measure_beside_the_step(monkeypatch):
    monkeypatch.setattr(telemetry, "recording_us", lambda num_sequences: 2.0 * num_sequences)
    monkeypatch.setattr(telemetry, "message_us", lambda: 3.0)
    well = Round(turn(10.0, 8.0), turn(10.2, 8.08), turn(10.0, 8.0))
    disturbed = Round(turn(10.0, 8.0), turn(30.0, 8.0), turn(9.0, 8.0))
    found = {row.name: row.value for row in telemetry.rows([well, disturbed, well], 10)}
    assert found["decode, telemetry off"] == pytest.approx(10.0)
    assert found["time a token, on against off"] == pytest.approx(2.0)
    assert found["time a token, off against off"] == pytest.approx(0.0)
    assert found["processor time a token, on against off"] == pytest.approx(1.0)
    # 20 us of recording and 30 us of messages, of a step of one second
    assert found["all of it for a step of 10"] == pytest.approx(0.005)


def test_recording_costs_something_and_more_for_more_sequences(monkeypatch):
    monkeypatch.setattr(telemetry, "NUM_CALLS", 50)
    monkeypatch.setattr(telemetry, "NUM_REPEATS", 5)
    assert 0 < telemetry.recording_us(1) < telemetry.recording_us(64)
    assert telemetry.message_us() > 0
