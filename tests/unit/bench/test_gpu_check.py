"""The script for a card runs here from its first to its last line, on the doubles."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from bench.gpu.setup import Setup
from bench.gpu.speed import ModelCost
from core.layout import Dtype
from engine.runner import Runner
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[3]
# What a machine with a card need not have.
MISSING = ("ray", "grpc", "pydantic", "yaml", "tokenizers", "transformers", "platformdirs", "typer")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The script's output, on a Python without MISSING."""
    hidden = tmp_path_factory.mktemp("hidden")
    for name in MISSING:
        (hidden / f"{name}.py").write_text(f"raise ImportError('no {name} on this machine')\n")
    environment = os.environ | {"PYTHONPATH": str(hidden), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "bench/gpu_check.sh", "--dry-run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_the_whole_script_runs_on_the_doubles(dry_run):
    assert dry_run.returncode == 0, dry_run.stderr
    facts = json.loads(dry_run.stdout.splitlines()[-1])
    assert facts["is_dry"] and facts["machine"].startswith("double on a CPU")
    values = {row["name"]: row["value"] for row in facts["rows"]}
    peers = {row["name"]: row["peer_value"] for row in facts["rows"]}
    for name in ("plain loop", "graphs"):
        equal = f"2 layers, float32, {name}: equal to the CPU"
        assert values[equal] == peers[equal] == 8
    errors = [value for name, value in values.items() if name.endswith(": error")]
    assert len(errors) == 6 and max(errors) < 0.02
    for size in (1, 2, 4):
        assert values[f"decode b{size}"] > 0 and values[f"decode b{size}: MBU"] > 0
    for size in (32, 128):
        assert values[f"prefill {size}: MFU"] > 0
    for way in ("ipc", "torch"):
        assert values[f"handoff of 128 tokens over {way}"] > 0
    assert sum(name.startswith("longest gap") for name in values) == 2
    assert [note for note in facts["notes"] if "flash-attn 3" in note and "3 graphs" in note]
    assert all(value > 0 for value in values.values())


def test_a_step_costs_its_weights_and_its_history_once(tmp_path):
    runner = Runner(
        write_tiny_model(tmp_path), dtype=Dtype.BFLOAT16, num_threads=1, kv_cache_bytes=1 << 20
    )
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 128
    cost = ModelCost(runner)
    kv_bytes = 4 * 2 * 2 * 16 * 2
    assert cost.decode_bytes(3, 10) == 2 * (4 * layer + 512 * 64) + 30 * kv_bytes
    assert cost.prefill_flops(1) == 2 * (4 * layer + 512 * 64) + 4 * 4 * 4 * 16


def test_a_card_gets_the_sizes_of_the_floors():
    setup = Setup.of(is_dry=False, kv_cache_gib=24)
    assert 2048 in setup.prefill_tokens and 32 in setup.decode_batches
    assert setup.kv_cache_bytes == 24 << 30
