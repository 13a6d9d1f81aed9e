"""Tensor parallelism: what the ranks of one worker say to each other while they run a step.

Rank 0 leads: it announces each step, gathers the logits and samples; the others compute the same
step on their shards (`engine.shard`). Knows nothing of weights, models or how ranks are started.

Two groups, built directly on a store: tensors travel over NCCL on CUDA and gloo on a CPU,
announcements always over gloo, since a rank may wait for the next step for hours, which must not
count as a failure nor keep a device busy. Any failure is PeerLost, and the end of the worker: ranks
that are out of step can never be put in step again.

Measured on two CPU cores, two ranks: gloo takes 2-3.5 ms for a sum, whatever its size, with its
event loop busy most of that time. Prefill gains from a second rank there, decode does not
(2026-11-30). The NCCL path shares this code and was not run where it was written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from core.errors import PeerLost

HOST = "127.0.0.1"
BUILD_TIMEOUT_S = 60.0
# From one rank's arrival at a sum to the last one's.
COLLECTIVE_TIMEOUT_S = 60.0
# An idle worker is no failure: a follower that waits for a step ends with its leader instead.
IDLE_TIMEOUT = timedelta(days=3650)

_INLINE_WORDS = 1024


class Parallel(Protocol):
    """What a model and a runner use of the other ranks."""

    rank: int
    size: int

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `partial`, in place.

        Returns once every rank has come here, also when `partial` is empty.
        """
        ...

    def gather(self, shard_BV: torch.Tensor) -> torch.Tensor | None:
        """On rank 0 the ranks' shards side by side, in order of rank; None on the others."""
        ...

    def announce(self, words: torch.Tensor) -> None:
        """Rank 0 tells the others about the next step, as flat int64."""
        ...

    def smallest(self, value: int) -> int:
        """The least of all ranks' values; the same on all of them."""
        ...


class SingleRank:
    """A worker of one rank: nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial` itself."""
        return partial

    def gather(self, shard_BV: torch.Tensor) -> torch.Tensor:
        """`shard_BV` itself."""
        return shard_BV

    def announce(self, words: torch.Tensor) -> None:
        """Nobody listens."""

    def smallest(self, value: int) -> int:
        """`value` itself."""
        return value


class TensorParallel:
    """One rank of `size`. Not thread-safe: one thread at a time, the same calls on every rank."""

    def __init__(self, rank: int, size: int, *, group: Any, step_group: Any) -> None:
        """Join groups that `build` made: a ProcessGroupGloo or ProcessGroupNCCL, untyped in torch.

        step_group carries announcements and is always gloo.
        """
        self.rank = rank
        self.size = size
        self._group = group
        self._step_group = step_group

    @classmethod
    def build(
        cls, store: TCPStore, rank: int, size: int, *, device: torch.device
    ) -> "TensorParallel":
        """Meet the other ranks on `store`; `device` is this rank's own.

        Raises:
            PeerLost: not all were there within BUILD_TIMEOUT_S.
        """
        with _lost_if_it_fails():
            timeout = timedelta(seconds=BUILD_TIMEOUT_S)
            step_group = _gloo_group(PrefixStore("steps", store), rank, size, timeout)
            step_group.set_timeout(IDLE_TIMEOUT)
            tensors = PrefixStore("tensors", store)
            if device.type == "cuda":
                group = _nccl_group(tensors, rank, size)
            else:
                group = _gloo_group(tensors, rank, size, timeout)
                group.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        return cls(rank, size, group=group, step_group=step_group)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Parallel`."""
        summed = partial if partial.numel() else partial.new_zeros(1)
        with _lost_if_it_fails():
            self._group.allreduce([summed]).wait()
        return partial

    def gather(self, shard_BV: torch.Tensor) -> torch.Tensor | None:
        """See `Parallel`."""
        is_leader = self.rank == 0
        shards = [torch.empty_like(shard_BV) for _ in range(self.size if is_leader else 0)]
        if shard_BV.numel():
            with _lost_if_it_fails():
                self._group.gather([shards] if is_leader else [], [shard_BV], _to_leader()).wait()
        return torch.cat(shards, dim=-1) if is_leader else None

    def announce(self, words: torch.Tensor) -> None:
        """See `Parallel`; the first broadcast tells the length and carries what fits."""
        head = torch.zeros(1 + _INLINE_WORDS, dtype=torch.int64)
        head[0] = words.numel()
        inline = words[:_INLINE_WORDS]
        head[1 : 1 + inline.numel()] = inline
        self._broadcast(head)
        if words.numel() > _INLINE_WORDS:
            self._broadcast(words[_INLINE_WORDS:].contiguous())

    def smallest(self, value: int) -> int:
        """See `Parallel`."""
        least = torch.tensor([value])
        options: Any = distributed.AllreduceOptions()  # the stubs refuse the operation
        options.reduceOp = distributed.ReduceOp.MIN
        with _lost_if_it_fails():
            self._step_group.allreduce([least], options).wait()
        return int(least)

    def next_announcement(self) -> torch.Tensor:
        """What rank 0 announces next; waits as long as it lives."""
        head = torch.empty(1 + _INLINE_WORDS, dtype=torch.int64)
        self._broadcast(head)
        num_words = int(head[0])
        if num_words <= _INLINE_WORDS:
            return head[1 : 1 + num_words]
        rest = torch.empty(num_words - _INLINE_WORDS, dtype=torch.int64)
        self._broadcast(rest)
        return torch.cat([head[1:], rest])

    def _broadcast(self, words: torch.Tensor) -> None:
        with _lost_if_it_fails():
            self._step_group.broadcast(words, 0, IDLE_TIMEOUT).wait()


def open_store(port: int) -> TCPStore:
    """A follower's client of the store that rank 0 has opened."""
    timeout = timedelta(seconds=BUILD_TIMEOUT_S)
    return TCPStore(HOST, port, is_master=False, timeout=timeout)


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        is_silent = "timed out" in str(error).lower()
        why = "it fell silent" if is_silent else "its connection ended"
        raise PeerLost("a rank of this worker", f"{why}; its last words are in the log") from error


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # The options that name the address are not in torch's type stubs.
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST, lazy_init=False)]
    options._timeout = timeout
    options._threads = 1
    return gloo(store, rank, size, options)


def _nccl_group(store: Store, rank: int, size: int) -> Any:
    nccl: Any = distributed.ProcessGroupNCCL  # absent from a torch without CUDA
    options = nccl.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return nccl(store, rank, size, options)


def _to_leader() -> Any:
    options = distributed.GatherOptions()
    options.rootRank = 0
    return options
