"""The official doubles of NCCL and of a card's memory, between processes on CPUs.

`SharedMemoryDouble` is what one process maps of another's card, in a memory file.
`open_group_double` is NCCL over gloo as far as a link can tell: works that are asked whether they
are completed, sizes that have to be equal, `abort`, after which nothing is possible. What it does
not show: streams, which have nothing to order here.
"""

import mmap
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, Work

from core.errors import PeerLost
from kv_transfer.torch_pair import gloo_group

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=10)

_TAG = 0


class WorkDouble:
    """A transfer in a thread of its own."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """True if it ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Raise what went wrong; only asked once it is completed."""
        assert self.is_completed(), "on a card the caller would sleep in milliseconds"
        if self._error is not None:
            raise self._error

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except RuntimeError as error:
            self._error = error


class SentDouble:
    """A send, which gloo never reports as completed."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works  # gloo cancels what is dropped

    def is_completed(self) -> bool:
        """As a card says of a send that went through its channels."""
        return True

    def wait(self) -> None:
        """Nothing went wrong."""


class GroupDouble:
    """A group of two ranks; each message is preceded by its size."""

    def __init__(self, store: Store, rank: int) -> None:
        self._gloo = gloo_group(store, rank, HOST, TIMEOUT)
        self._sent: list[SentDouble] = []
        self.is_aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SentDouble:
        """As NCCL's."""
        group = self._alive()
        size = torch.tensor([tensors[0].nbytes])
        sent = SentDouble([group.send([size], peer, _TAG), group.send(tensors, peer, _TAG)])
        self._sent.append(sent)
        return sent

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> WorkDouble:
        """As NCCL's, but for a refusal of another size in the place of a hang."""
        group = self._alive()
        size = torch.zeros(1, dtype=torch.int64)
        announced = group.recv([size], peer, _TAG)

        def receive() -> None:
            announced.wait(TIMEOUT)
            if int(size) != tensors[0].nbytes:  # gloo would end the process
                raise RuntimeError(f"{int(size)} bytes were sent, {tensors[0].nbytes} expected")
            group.recv(tensors, peer, _TAG).wait(TIMEOUT)

        return WorkDouble(receive)

    def abort(self) -> None:
        """Give the group up."""
        self.is_aborted = True
        self._gloo = None
        self._sent.clear()

    def _alive(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the communicator was aborted")
        return self._gloo


def open_group_double(store: Store, rank: int) -> GroupDouble:
    """In the place of `nccl_pair.open_nccl`."""
    return GroupDouble(store, rank)


class SharedMemoryDouble:
    """See `mapping.Memory`: a process of the same user maps the file by its number."""

    def __init__(self) -> None:
        self._memfd = -1

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Called once."""
        assert self._memfd < 0
        self._memfd = os.memfd_create("twophase-card-double", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, num_bytes)
        return _map(self._memfd, num_bytes)

    def export(self, cache: torch.Tensor) -> dict[str, str]:
        """What `map` needs."""
        return {
            "process": str(os.getpid()),
            "file": str(self._memfd),
            "storage_bytes": str(cache.untyped_storage().nbytes()),
        }

    def map(self, parameters: dict[str, str]) -> torch.Tensor:
        """The whole storage."""
        try:
            path = f"/proc/{parameters['process']}/fd/{parameters['file']}"
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost("decode", f"its card's memory cannot be mapped: {error}") from error
        try:
            return _map(mine, int(parameters["storage_bytes"]))
        finally:
            os.close(mine)

    def close(self) -> None:
        """Close the file; what is mapped stays. Idempotent."""
        if self._memfd >= 0:
            os.close(self._memfd)
            self._memfd = -1


def _map(memfd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(memfd, num_bytes), dtype=torch.uint8)
