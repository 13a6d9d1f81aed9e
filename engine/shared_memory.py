"""Memory that the ranks of one worker share, so that rank 0 can reach the caches of all.

A memfd: it has no name and vanishes with the last process that maps it, also after SIGKILL.
"""

import mmap
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A mapped memory file: `storage` is flat uint8, `fd` is what another process maps."""

    storage: torch.Tensor
    fd: int


def allocate_shared(num_bytes: int) -> SharedMemory:
    """New zeroed memory; the caller closes `fd`, the mapping lives as long as its tensors."""
    fd = os.memfd_create("twophase-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return SharedMemory(_map(fd, num_bytes), fd)


def map_shared_of(process_id: int, fd: int, num_bytes: int) -> torch.Tensor:
    """The memory behind `fd` of another process of this user."""
    mine = os.open(f"/proc/{process_id}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(mine, num_bytes)
    finally:
        os.close(mine)


def _map(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
