"""Which ways into its cache a decode worker holds open, by where the cache lies."""

import os

import pytest

from core.config import load_config
from decode_worker.config import DecodeWorkerConfig
from decode_worker.server import _lender, _open_backends
from kv_transfer.backend import BackendKind
from kv_transfer.nixl.agent import is_installed

NIXL = {BackendKind.NIXL} if is_installed() else set()


@pytest.fixture
def opened(monkeypatch):
    """Opens the backends of a configuration; closes them at the end."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    everything = []

    def open_(*overrides):
        backends = _open_backends(DecodeWorkerConfig.from_cluster(load_config(None, overrides)))
        everything.extend(backends.values())
        return backends

    yield open_
    for backend in everything:
        backend.close()


def test_on_a_card_those_that_reach_a_card_and_nobody_lends_a_cpu_s_memory(opened):
    backends = opened("engine.device=cuda")
    assert set(backends) == {BackendKind.IPC, BackendKind.TORCH} | NIXL
    assert _lender(backends) is None
    # a dead peer must end its link, and not this process by torch's watchdog
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


def test_ranks_on_cards_keep_the_quick_waits_of_their_sums(opened):
    opened("engine.device=cuda", "mode=chunked", "decode.tensor_parallel=2")
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_on_a_cpu_shared_memory_is_lent_and_no_card_is_thought_of(opened):
    backends = opened()
    assert {BackendKind.SHM, BackendKind.TORCH} <= set(backends)
    assert BackendKind.IPC not in backends
    assert _lender(backends) is not None
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_a_configured_backend_is_the_only_one(opened):
    assert set(opened("engine.device=cuda", "transfer.backend=ipc")) == {BackendKind.IPC}
