"""From figures of a cluster to the coefficients of a machine."""

import pytest

from bench.simulate.calibration import Measured

TOKEN_S, PAIR_S, REQUEST_S = 1e-3, 2e-7, 0.03
LENGTHS = (16, 192, 896, 1280)
BASE_S, SEQUENCE_S, KV_S = 0.03, 0.002, 1e-6


def prompt_s(num_tokens):
    return REQUEST_S + TOKEN_S * num_tokens + PAIR_S * num_tokens**2 / 2


def step_s(size, history):
    return BASE_S + SEQUENCE_S * size + KV_S * history


def test_coefficients_are_those_that_the_figures_were_made_with():
    sizes = ((1, 50), (2, 100), (4, 200), (4, 2600), (8, 400))
    measured = Measured(
        # one of each length a tenth slower, and one a tenth faster
        prompts=[(n, prompt_s(n) * pace) for n in LENGTHS for pace in (1.1, 0.9)],
        crowded_prompts=[(n, prompt_s(n) * 1.2) for n in LENGTHS for _ in range(2)],
        steps=[(size, history, step_s(size, history)) for size, history in sizes],
        crowded_step_s=step_s(2, 100) * 1.5,
        handoffs=[(size, 1e-3 + size / 1e9) for size in (10**6, 10**7)],
    )
    machine = measured.machine()
    assert machine.request_s == pytest.approx(REQUEST_S)
    assert machine.prefill_s(600, 0) == pytest.approx(prompt_s(600) - REQUEST_S)
    assert machine.decode_s(6, 1000) == pytest.approx(step_s(6, 1000))
    assert machine.link_bytes_per_s == pytest.approx(1e9)
    assert machine.link_latency_s == pytest.approx(1e-3)
    assert machine.prefill_crowding == pytest.approx(1.2)
    assert machine.decode_crowding == pytest.approx(1.5)


def test_what_noise_would_make_negative_is_left_out():
    measured = Measured(
        prompts=[(100, 0.1), (200, 0.15), (400, 0.2)],  # longer prompts are read faster
        crowded_prompts=[(100, 0.09)],
        steps=[(1, 50, 0.06), (2, 100, 0.05), (4, 200, 0.05)],
        crowded_step_s=0.04,
        handoffs=[(10**6, 2e-3), (10**7, 1e-3)],
    )
    machine = measured.machine()
    assert machine.prefill_pair_s == 0
    assert machine.decode_s(16, 1000) >= machine.decode_s(1, 50) > 0
    assert (machine.prefill_crowding, machine.decode_crowding) == (1.0, 1.0)
    assert machine.link_bytes_per_s == 4.5e9
