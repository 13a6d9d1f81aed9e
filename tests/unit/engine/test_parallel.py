"""What one rank asks of its groups; the groups are recorded, not real."""

import pytest
import torch

from core.errors import PeerLost
from engine.parallel import SingleRank, TensorParallel


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
