"""Each pair of workers gets the fastest backend that can join it, or a clear refusal."""

import pytest

from core.errors import ConfigError
from kv_transfer.backend import BackendKind, Endpoint, choose_backend

CPU_A, CPU_B = Endpoint("host-a", "cpu"), Endpoint("host-b", "cpu")
CUDA_A = Endpoint("host-a", "cuda")


def test_auto_takes_shared_memory_between_two_cpu_workers_of_one_host():
    choice = choose_backend("auto", prefill=CPU_A, decode=CPU_A)
    assert choice.kind is BackendKind.SHM
    assert "one host" in choice.why


@pytest.mark.parametrize(("prefill", "decode"), [(CPU_A, CPU_B), (CUDA_A, CUDA_A), (CUDA_A, CPU_A)])
def test_auto_takes_torch_where_memory_cannot_be_shared(prefill, decode):
    choice = choose_backend("auto", prefill=prefill, decode=decode)
    assert choice.kind is BackendKind.TORCH
    assert "host" in choice.why


def test_a_configured_backend_is_taken_where_it_works():
    assert choose_backend("torch", prefill=CPU_A, decode=CPU_A).kind is BackendKind.TORCH
    assert choose_backend("shm", prefill=CPU_A, decode=CPU_A).kind is BackendKind.SHM


def test_shared_memory_between_hosts_is_refused_with_both_values():
    with pytest.raises(ConfigError, match=r"host-a.*host-b"):
        choose_backend("shm", prefill=CPU_A, decode=CPU_B)


@pytest.mark.parametrize("name", ["gloo", "memory", ""])
def test_an_unknown_backend_is_refused_with_its_name(name):
    with pytest.raises(ConfigError, match="auto, shm, torch"):
        choose_backend(name, prefill=CPU_A, decode=CPU_A)
