"""Every server starts and serves where there is no CUDA, no flash-attn and no nixl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.parity import wait_until_ready
from core.config import load_config
from core.process import EXIT_REFUSED
from deploy.local_cluster import local_cluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

ABSENT = (
    "flash_attn",
    "flash_attn_interface",
    "fa3_fwd_interface",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
)
# Read by each Python as it starts: to import one of them fails as if it were not installed.
HIDE = f"""
import os, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
open(os.path.join(os.path.dirname(__file__), "started"), "a").write("one\\n")
"""


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Child processes find none of ABSENT and no card; `started` gets a line for each."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "started"


async def test_a_cluster_serves_and_tells_what_computes(bare: Path, tiny_model_directory: Path):
    overrides = ("prefill.kv_cache=2MiB", "decode.kv_cache=2MiB", "router.port=0")
    config = load_config(
        None, [f"model={tiny_model_directory}", "router.http_port=null", *overrides]
    )
    with local_cluster(config, tell=lambda line: None) as cluster:
        assert bare.read_text().count("one") >= 3
        async with AsyncClient(cluster.address) as client:
            await wait_until_ready(client)
            sampling = Sampling(max_tokens=5, temperature=0.0)
            chunks = [c async for c in client.generate([5, 6, 7] * 20, sampling)]
            status = await client.status()
        assert chunks[-1].completion is not None
        assert {worker.name for worker in status.workers} == {"prefill-0", "decode-0"}
        for worker in status.workers:
            assert worker.kernels.startswith("numba: CPU with numba")
        await assert_nothing_left(cluster.address)
        shown = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "status", "--address", cluster.address],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert "-0: numba: CPU with numba: paged kernel for decode" in shown


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_to_use_a_card_refuses_to_start_without_one(
    bare: Path, tiny_model_directory: Path, role: str
):
    result = subprocess.run(
        [
            *(sys.executable, "-m", f"{role}_worker"),
            *(f"model={tiny_model_directory}", "engine.device=cuda"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert result.returncode == EXIT_REFUSED
    assert f"engine.device: is cuda, and torch {torch.__version__} sees no card" in result.stderr
