"""Each pair of workers gets the fastest backend that can join it, or a clear refusal."""

import sys

import pytest
import torch

from core.errors import ConfigError
from kv_transfer import shm
from kv_transfer.backend import BackendKind, Endpoint, Offer, choose_backend
from kv_transfer.connection import connect, has_rdma, local_endpoint, open_backend

CPU_A, CPU_B = Endpoint("host-a", "cpu"), Endpoint("host-b", "cpu")


def card(name, host="host-a", reaches=(), has_nixl=False, **facts):
    """A worker on a card that reaches itself and these others."""
    reachable = (name, *reaches)
    return Endpoint(
        host, "cuda:0", has_nixl=has_nixl, card=name, reachable_cards=reachable, **facts
    )


CARD_0, CARD_1 = "uuid-0/ipc:1", "uuid-1/ipc:1"


def with_nixl(host, device="cpu", has_rdma=False):
    return Endpoint(host, device, has_nixl=True, has_rdma=has_rdma)


def test_auto_takes_shared_memory_between_two_cpu_workers_of_one_host():
    choice = choose_backend(
        "auto", prefill=with_nixl("a", has_rdma=True), decode=with_nixl("a", has_rdma=True)
    )
    assert choice.kind is BackendKind.SHM
    assert "one host" in choice.why


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (CPU_A, CPU_B, "different hosts"),
        (with_nixl("a"), with_nixl("b"), "different hosts"),
        (with_nixl("a", has_rdma=True), with_nixl("b"), "different hosts"),
        (Endpoint("a", "cpu", has_rdma=True), Endpoint("b", "cpu", has_rdma=True), "not installed"),
        (card(CARD_0), card(CARD_1), "without peer access"),
        (card(CARD_0), card(CARD_1), "not installed at prefill and decode"),
        (card(CARD_0, has_nixl=True), card(CARD_1), "not installed at decode"),
        (card(CARD_0), card("uuid-9/ipc:1", "host-b"), "different hosts"),
    ],
)
def test_auto_takes_torch_where_nothing_faster_reaches_and_says_why(prefill, decode, why):
    choice = choose_backend("auto", prefill=prefill, decode=decode)
    assert choice.kind is BackendKind.TORCH
    assert "host" in choice.why
    assert why in choice.why


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (with_nixl("a", has_rdma=True), with_nixl("b", has_rdma=True), "RDMA"),
        (
            card(CARD_0, has_nixl=True, has_rdma=True),
            card(CARD_1, "host-b", has_nixl=True, has_rdma=True),
            "RDMA",
        ),
        (card(CARD_0, has_nixl=True), card(CARD_1, has_nixl=True), "without peer access"),
        (card(CARD_0, has_nixl=True), card("uuid-0/ipc:2", has_nixl=True), "on one card"),
    ],
)
def test_auto_takes_nixl_over_rdma_and_between_cards_that_do_not_reach_each_other(
    prefill, decode, why
):
    choice = choose_backend("auto", prefill=prefill, decode=decode)
    assert choice.kind is BackendKind.NIXL
    assert why in choice.why


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (card(CARD_0), card(CARD_0), "on one card"),
        (card(CARD_0, has_nixl=True), card(CARD_0, has_nixl=True), "on one card"),
        (card(CARD_0, reaches=[CARD_1]), card(CARD_1), "with peer access"),
        # the writer's way counts: prefill writes
        (card(CARD_0, reaches=[CARD_1], has_nixl=True), card(CARD_1, has_nixl=True), "peer access"),
    ],
)
def test_auto_writes_in_place_between_cards_that_reach_each_other(prefill, decode, why):
    choice = choose_backend("auto", prefill=prefill, decode=decode)
    assert choice.kind is BackendKind.IPC
    assert why in choice.why


def test_two_workers_of_one_card_never_get_nccl():
    one, elsewhere = card(CARD_0), card("uuid-0/ipc:2")
    for decode in (one, elsewhere):
        with pytest.raises(ConfigError, match="NCCL joins no two ranks there"):
            choose_backend("torch", prefill=one, decode=decode)
    with pytest.raises(ConfigError, match=r"--ipc=host.*NCCL.*nixl is not installed at prefill"):
        choose_backend("auto", prefill=one, decode=elsewhere)
    assert choose_backend("torch", prefill=one, decode=card(CARD_1)).kind is BackendKind.TORCH


@pytest.mark.parametrize(
    "decode", [card(CARD_1), card(CARD_0, "host-b"), card("uuid-0/ipc:2")], ids=str
)
def test_ipc_is_refused_where_prefill_cannot_map_the_cache(decode):
    with pytest.raises(ConfigError, match=f"cannot map the memory of decode's card {decode.card}"):
        choose_backend("ipc", prefill=card(CARD_0), decode=decode)


@pytest.mark.parametrize("configured", ["auto", "shm", "ipc", "torch", "nixl"])
def test_a_cpu_and_a_card_are_never_joined(configured):
    for pair in ((CPU_A, card(CARD_0)), (card(CARD_0), CPU_A)):
        with pytest.raises(ConfigError, match="between a CPU and a card"):
            choose_backend(configured, prefill=pair[0], decode=pair[1])


def test_a_configured_backend_is_taken_where_it_works():
    assert choose_backend("ipc", prefill=card(CARD_0), decode=card(CARD_0)).kind is BackendKind.IPC
    assert choose_backend("torch", prefill=CPU_A, decode=CPU_A).kind is BackendKind.TORCH
    assert choose_backend("shm", prefill=CPU_A, decode=CPU_A).kind is BackendKind.SHM
    pair = {"prefill": with_nixl("a"), "decode": with_nixl("b")}
    assert choose_backend("nixl", **pair).kind is BackendKind.NIXL


def test_shared_memory_between_hosts_is_refused_with_both_values():
    with pytest.raises(ConfigError, match=r"host-a.*host-b"):
        choose_backend("shm", prefill=CPU_A, decode=CPU_B)


def test_nixl_without_the_extra_is_refused_with_its_name_and_the_end_that_lacks_it():
    with pytest.raises(ConfigError, match=r"at decode: pip install twophase\[rdma\]"):
        choose_backend("nixl", prefill=with_nixl("a"), decode=CPU_B)


@pytest.mark.parametrize("name", ["gloo", "memory", ""])
def test_an_unknown_backend_is_refused_with_its_name(name):
    with pytest.raises(ConfigError, match="auto, shm, ipc, torch, nixl"):
        choose_backend(name, prefill=CPU_A, decode=CPU_A)


def test_a_worker_without_nixl_cannot_open_or_join_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    cache = torch.zeros(1, 2, 1, 4, 1, 8)
    assert not local_endpoint(cache).has_nixl
    with pytest.raises(ConfigError, match=r"twophase\[rdma\]"):
        open_backend(BackendKind.NIXL, host="127.0.0.1")
    with pytest.raises(ConfigError, match=r"twophase\[rdma\]"):
        connect(Offer("nixl", {}), cache, 1.0)


def test_an_endpoint_names_this_host_and_where_the_cache_lies():
    endpoint = local_endpoint(torch.zeros(1, 2, 1, 4, 1, 8))
    assert (endpoint.host_id, endpoint.device) == (shm.host_id(), "cpu")


@pytest.mark.parametrize(
    ("states", "expected"),
    [([], False), (["1: DOWN"], False), (["1: DOWN", "4: ACTIVE"], True), (["2: INIT"], False)],
)
def test_rdma_needs_a_port_that_is_active(tmp_path, states, expected):
    for number, state in enumerate(states):
        port = tmp_path / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n", encoding="ascii")
    assert has_rdma(tmp_path) == expected
    assert not has_rdma(tmp_path / "absent")
