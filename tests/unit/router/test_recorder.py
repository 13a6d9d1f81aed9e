"""What a router writes down of its requests, and that the simulator reads it back."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.simulate.cluster import BLOCK_TOKENS
from bench.simulate.trace import read_trace
from core.errors import ConfigError
from router.telemetry.recorder import Recorder
from tests.unit.router.doubles import make_request


class Answered:
    def __init__(self, prompt, num_output_tokens):
        self.request = dataclasses.replace(make_request(), prompt_token_ids=tuple(prompt))
        self.log = [1] * num_output_tokens


def test_times_lengths_and_shared_blocks_come_back_as_arrivals(tmp_path):
    path = tmp_path / "record"
    with Recorder(path) as recorder:
        recorder.left(100.0, [Answered(range(40), 7)])
        recorder.left(103.5, [Answered((*range(32), 99), 0), Answered((*range(32), 99), 3)])
    first, second, third = read_trace(path, block_size=BLOCK_TOKENS)
    assert (first.at_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 40, 7)
    assert (second.at_s, second.num_prompt_tokens, second.num_output_tokens) == (3.5, 33, 1)
    assert third.num_output_tokens == 3
    assert first.block_ids == second.block_ids == third.block_ids
    assert len(first.block_ids) == 2


def test_no_token_is_written_and_two_routers_name_the_same_prompt_differently(tmp_path):
    rows = []
    for name in ("a", "b"):
        with Recorder(tmp_path / name) as recorder:
            recorder.left(0.0, [Answered(range(1000, 1040), 7)])
        rows.append(json.loads((tmp_path / name).read_text()))
    assert rows[0].pop("blocks") != rows[1].pop("blocks")
    assert rows[0] == rows[1]
    assert set(rows[0]) == {"at_s", "num_prompt_tokens", "num_output_tokens", "block_size"}


def test_a_file_that_cannot_be_opened_is_a_mistake_in_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match="router.record"):
        Recorder(tmp_path / "none" / "record")


def test_a_full_disk_ends_the_recording_and_no_request(caplog):
    with Recorder(Path("/dev/full")) as recorder:
        recorder.left(0.0, [Answered(range(4), 1)])
        recorder.left(0.0, [Answered(range(4), 1)])
    assert caplog.text.count("recording ends") == 1


def test_a_record_of_other_blocks_is_refused(tmp_path):
    path = tmp_path / "record"
    with Recorder(path) as recorder:
        recorder.left(0.0, [Answered(range(40), 7)])
    with pytest.raises(ConfigError, match="blocks of 16 tokens, not 32"):
        read_trace(path, block_size=32)
