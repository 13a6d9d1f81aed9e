"""Starts the ranks of one worker: rank 0 is the caller's own runner, the others child processes.

`running_engine` is what a worker uses whatever its number of ranks. Followers end with the leader,
however it ends; a follower that ends first shows as PeerLost in the leader's next step. All caches
lie in one memory file, so that rank 0 alone can hand KV blocks of all ranks over.
"""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from core.config import DecodeConfig, EngineConfig, PoolConfig
from core.errors import PeerLost
from core.layout import Dtype
from engine.parallel import HOST, TensorParallel
from engine.rank import LOADED, UP, RankSettings
from engine.runner import Runner
from engine.shared_memory import SharedMemory, allocate_shared

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0

Allocate = Callable[[int], SharedMemory]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One worker's engine.

    num_threads are those of each rank; cores and gpus those of all ranks, in order; device is
    "cpu", or "cuda", where rank i takes the i-th card of gpus, or else card i. block_size and
    kv_cache_bytes as `Runner` takes them. max_batch_tokens are the most that a step will have,
    max_decode_sequences the most sequences of a decode step that is to be a graph.
    """

    model_directory: Path
    dtype: Dtype
    num_threads: int
    block_size: int | None = None
    kv_cache_bytes: int | None = None
    max_context_tokens: int | None = None
    tensor_parallel: int = 1
    nice: int = 0
    cores: tuple[int, ...] | None = None
    device: str = "cpu"
    gpus: tuple[int, ...] | None = None
    max_batch_tokens: int = 0
    max_decode_sequences: int = 0

    @classmethod
    def of(
        cls,
        model_directory: Path,
        engine: EngineConfig,
        pool: PoolConfig,
        *,
        cores: tuple[int, ...] | None,
        gpus: tuple[int, ...] | None = None,
    ) -> "EngineSettings":
        """The settings of one worker of `pool`, of which it has these cores and cards."""
        num_graph_sequences = 0
        if isinstance(pool, DecodeConfig) and pool.cuda_graphs:
            num_graph_sequences = pool.max_num_sequences
        return cls(
            model_directory=model_directory,
            dtype=engine.dtype,
            block_size=engine.block_size,
            kv_cache_bytes=pool.kv_cache,
            num_threads=pool.num_threads,
            max_context_tokens=engine.max_context_tokens,
            tensor_parallel=pool.tensor_parallel,
            nice=engine.nice,
            cores=cores,
            device=engine.device,
            gpus=gpus,
            max_batch_tokens=pool.max_batch_tokens,
            max_decode_sequences=num_graph_sequences,
        )

    def device_of(self, rank: int) -> str:
        """The device of one rank, as torch names it."""
        if self.device == "cpu":
            return self.device
        return f"{self.device}:{self.gpus[rank] if self.gpus is not None else rank}"

    def cores_of(self, rank: int) -> tuple[int, ...] | None:
        """Cores of one rank; None leaves the choice to the system."""
        if self.cores is None:
            return None
        return self.cores[rank * self.num_threads :][: self.num_threads]

    def of_rank(self, rank: int, store_port: int) -> RankSettings:
        """What one rank is told."""
        return RankSettings(
            rank=rank,
            size=self.tensor_parallel,
            store_port=store_port,
            model_directory=str(self.model_directory),
            dtype=self.dtype,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_bytes,
            num_threads=self.num_threads,
            max_context_tokens=self.max_context_tokens,
            nice=self.nice,
            cores=self.cores_of(rank),
            device=self.device_of(rank),
            max_decode_sequences=self.max_decode_sequences,
        )


@contextmanager
def running_engine(settings: EngineSettings, allocate: Allocate | None = None) -> Iterator[Runner]:
    """A warm runner, with its other ranks if it has any, while the context lasts.

    allocate(num_bytes) lends the memory of all ranks' caches where they lie in a CPU's memory; None
    leaves it to the engine.

    Raises:
        ModelError, ConfigError: the model cannot be run like this.
        PeerLost: a rank did not start.

    Contract: entered in the thread that will call `step`, left from any.
    """
    began_s = time.perf_counter()
    with ExitStack() as stack:
        if settings.tensor_parallel == 1:
            lend = None
            if allocate is not None and settings.device == "cpu":
                lend = partial(_storage, allocate)
            runner = settings.of_rank(0, 0).load(lend, None)
        else:
            runner = _lead(settings, allocate or _own_memory(stack), stack)
        # On a CPU the largest step takes seconds and proves nothing: memory is the system's.
        runner.warm_up(0 if settings.device == "cpu" else settings.max_batch_tokens)
        runner.load_s = time.perf_counter() - began_s
        yield runner


def _lead(settings: EngineSettings, allocate: Allocate, stack: ExitStack) -> Runner:
    """Rank 0's runner; leaving `stack` ends the other ranks."""
    # Left to itself the store listens on every interface.
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    mine, *others = (settings.of_rank(r, store.port) for r in range(settings.tensor_parallel))
    followers = [stack.enter_context(_running(other)) for other in others]
    for follower in followers:
        follower.expect(UP)
    parallel = TensorParallel.build(store, 0, mine.size, device=torch.device(mine.device))

    def lend(num_bytes: int) -> torch.Tensor:
        memory = allocate(num_bytes)
        parallel.announce(torch.tensor([memory.fd]))
        return memory.storage

    runner = mine.load(lend if mine.device == "cpu" else None, parallel)
    for follower in followers:
        follower.expect(LOADED)
    return runner


def _storage(allocate: Allocate, num_bytes: int) -> torch.Tensor:
    return allocate(num_bytes).storage


def _own_memory(stack: ExitStack) -> Allocate:
    def allocate(num_bytes: int) -> SharedMemory:
        memory = allocate_shared(num_bytes)
        stack.callback(os.close, memory.fd)
        return memory

    return allocate


class _Follower:
    """The process of one rank; its standard input is what keeps it alive."""

    def __init__(self, settings: RankSettings) -> None:
        self._name = f"rank {settings.rank} of {settings.size}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.rank", settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the leader.
            start_new_session=True,
        )

    def expect(self, word: str) -> None:
        """Wait until it says `word`.

        Raises:
            PeerLost: it ended, or did not say it within START_TIMEOUT_S.
        """
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(START_TIMEOUT_S):
                raise PeerLost(self._name, f"not {word} within {START_TIMEOUT_S:g} s")
        if output.readline().decode().strip() != word:
            raise PeerLost(self._name, f"it ended with code {self._process.wait()} at its start")

    def stop(self) -> None:
        """End it, by force after STOP_TIMEOUT_S."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _running(settings: RankSettings) -> Iterator[_Follower]:
    follower = _Follower(settings)
    try:
        yield follower
    finally:
        follower.stop()
