"""Links for contract tests: both ends of any backend, the sender in a peer where it can be."""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch

from tests.contract.kinds import SOON_S, Named
from tests.contract.peer import NO_FAULTS, Commands, Peer, random_cache

NUM_SOURCE_BLOCKS, NUM_TARGET_BLOCKS = 10, 14
SEED = 3


def make_backend(kind, take_timeout_s=SOON_S):
    return Named(kind, take_timeout_s)


class MemorySide(Commands):
    """The sender's side of the in-process backend, told like a peer process."""

    def __init__(self, backend):
        self.stream, theirs = multiprocessing.Pipe()
        super().__init__(theirs)
        self._connect = lambda offer, *rest: backend.connect(
            replace(offer, kind=backend.kind), *rest
        )

    def close(self):
        super().close()
        self.stream.close()
        self._stream.close()


class Link:
    """Both ends of a link: `peer` sends by `plan`, `receiver` takes into `cache`."""

    def __init__(
        self,
        kind,
        peer,
        dtype=torch.float32,
        *,
        name="link",
        take_timeout_s=SOON_S,
        plan=NO_FAULTS,
    ):
        self.kind = kind
        self.source = random_cache(dtype, seed=SEED, num_blocks=NUM_SOURCE_BLOCKS)
        blank = random_cache(dtype, seed=0, num_blocks=NUM_TARGET_BLOCKS)
        self.backend = make_backend(kind, take_timeout_s)
        storage = self.backend.allocate(blank.nbytes)
        self.cache = storage.view(dtype).view(blank.shape)
        self.source = self.source.to(self.cache.device)
        offer, self.receiver = self.backend.offer(name, self.cache)
        self.peer = MemorySide(self.backend) if kind == "memory" else peer
        arguments = (offer, dtype, SEED, NUM_SOURCE_BLOCKS, 10.0, plan)
        if kind == "memory":
            self.peer.connect(*arguments)
            self.receiver.accept(SOON_S)
        else:
            self.peer.begin("connect", *arguments)
            self.receiver.accept(SOON_S)
            self.peer.answer()

    def close(self):
        self.receiver.close()
        self.backend.close()


@pytest.fixture(scope="module")
def shared_peer():
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
def own_peer():
    peer = Peer()
    yield peer
    peer.stop()


def wait_until(is_true):
    """Contract tests wait for the kernel and for other processes, never for a fixed time."""
    until_s = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.005)
