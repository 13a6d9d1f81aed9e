"""A rank of a worker other than the first: python -m engine.rank, started by `engine.leader`.

It ends when its standard input ends, which happens whenever the leader does, however that dies; on
Linux also while it is stopped.

1. imported: says UP on standard output
2. meets the other ranks; rank 0 announces where the memory of all caches is
3. has loaded its shard: says LOADED
4. computes each step that rank 0 announces
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from core.errors import PeerLost
from core.layout import Dtype
from core.process import end_with_parent
from engine.device import open_device
from engine.parallel import TensorParallel, open_store
from engine.runner import Runner
from engine.shared_memory import map_shared_of

UP, LOADED = "up", "loaded"


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What one rank is told, as `Runner` takes it; device as torch names it."""

    rank: int
    size: int
    model_directory: str
    dtype: Dtype
    block_size: int | None
    kv_cache_bytes: int | None
    num_threads: int
    max_context_tokens: int | None
    nice: int
    cores: tuple[int, ...] | None
    device: str
    max_decode_sequences: int
    store_port: int

    def to_json(self) -> str:
        """As the one argument of a follower."""
        return json.dumps(asdict(self))

    def load(
        self, allocate: Callable[[int], torch.Tensor] | None, parallel: TensorParallel | None
    ) -> Runner:
        """This rank's runner, as `Runner` takes its arguments."""
        return Runner(
            Path(self.model_directory),
            dtype=self.dtype,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_bytes,
            num_threads=self.num_threads,
            allocate=allocate,
            max_context_tokens=self.max_context_tokens,
            max_decode_sequences=self.max_decode_sequences,
            device=open_device(self.device),
            parallel=parallel,
        )

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        """What `to_json` wrote."""
        settings = cls(**json.loads(text))
        cores = tuple(settings.cores) if settings.cores is not None else None
        return replace(settings, dtype=Dtype(settings.dtype), cores=cores)


def follow(settings: RankSettings) -> None:
    """Be this rank; returns never.

    Raises:
        PeerLost: another rank is gone.
    """
    device = torch.device(settings.device)
    store = open_store(settings.store_port)
    parallel = TensorParallel.build(store, settings.rank, settings.size, device=device)

    def allocate(num_bytes: int) -> torch.Tensor:
        fd = int(parallel.next_announcement()[0])
        return map_shared_of(os.getppid(), fd, num_bytes)

    runner = settings.load(allocate if device.type == "cpu" else None, parallel)
    _say(LOADED)
    while True:
        runner.follow(parallel.next_announcement())


def main() -> int:
    """Run until the leader ends; 1 if a rank was lost before that."""
    settings = RankSettings.from_json(sys.argv[1])
    end_with_parent()
    threading.Thread(target=_end_with_input, daemon=True).start()
    if settings.cores is not None:
        os.sched_setaffinity(0, settings.cores)
    os.nice(settings.nice)
    _say(UP)
    try:
        follow(settings)
    except PeerLost as error:
        sys.stderr.write(f"twophase: rank {settings.rank}: {error}\n")
    return 1


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
