"""What one rank asks of its groups; where nothing else is said they are recorded, not real."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from core.errors import PeerLost
from engine.parallel import HOST, SingleRank, TensorParallel, open_store


class Group:
    """Stands for a process group of two ranks that hold the same numbers."""

    def __init__(self, error=None):
        self.reduced = []
        self.error = error

    def allreduce(self, tensors):
        self.reduced += tensors
        for tensor in tensors:
            tensor *= 2
        return self

    def wait(self):
        if self.error is not None:
            raise self.error


def rank_of(group):
    return TensorParallel(0, 2, group=group, step_group=None)


def test_the_sum_is_in_place():
    partial = torch.ones(3)
    assert rank_of(Group()).all_reduce(partial) is partial
    assert partial.tolist() == [2, 2, 2]


def test_a_sum_over_no_rows_still_waits_for_the_other_ranks():
    group = Group()
    assert rank_of(group).all_reduce(torch.empty(0, 8)).shape == (0, 8)
    assert [tensor.numel() for tensor in group.reduced] == [1]


@pytest.mark.parametrize(
    ("text", "why"),
    [("Timed out waiting 2000ms for recv", "fell silent"), ("Connection closed", "ended")],
)
def test_a_failure_tells_silence_from_an_end(text, why):
    with pytest.raises(PeerLost, match=why):
        rank_of(Group(RuntimeError(text))).all_reduce(torch.ones(1))


def test_a_single_rank_has_nobody_to_ask():
    alone, logits = SingleRank(), torch.ones(2, 3)
    assert alone.all_reduce(logits) is logits
    assert alone.gather(logits) is logits
    assert alone.smallest(5) == 5


def test_ranks_agree_on_the_least_of_their_values():
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    stores = (store, open_store(port))

    def value_of(rank):
        parallel = TensorParallel.build(stores[rank], rank, 2, device=torch.device("cpu"))
        return parallel.smallest((3 << 40, 7)[rank])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(value_of, (0, 1), timeout=60)) == [7, 7]
