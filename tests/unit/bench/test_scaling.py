"""The parts of bench-scaling that need no cluster."""

from bench.scaling import HALVES, SETTINGS, sizes_of
from core.config import load_config


def test_the_settings_are_a_configuration_with_room_for_one_more_worker():
    config = load_config(None, SETTINGS)
    assert config.scaling.budget == config.prefill_pool.replicas + config.decode.replicas + 1


def test_the_load_turns():
    first, second = HALVES
    assert first.num_prompt_tokens > second.num_prompt_tokens
    assert first.num_output_tokens < second.num_output_tokens


def test_sizes_are_those_after_each_decision():
    pools = [{"role": "prefill", "after": 2}, {"role": "decode", "after": 1}]
    assert sizes_of([{"pools": pools}, {"pools": pools}]) == {"prefill": [2, 2], "decode": [1, 1]}
