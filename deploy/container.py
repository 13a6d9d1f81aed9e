"""What containers lack unless they are given it, said with the option that gives it."""

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def free_shared_memory() -> int | None:
    """Bytes that are free in /dev/shm; None where there is no such thing."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def shared_memory_problem(num_free_bytes: int | None, num_needed_bytes: int) -> str | None:
    """What to change before Ray's object store fits; None if it does, or cannot be known.

    Ray then uses a file on disk. Nothing of twophase goes through it, so requests are not slower.
    """
    if num_free_bytes is None or num_free_bytes >= num_needed_bytes:
        return None
    return (
        f"/dev/shm has {num_free_bytes >> 20} MiB free, and Ray's object store takes "
        f"{num_needed_bytes >> 20} MiB: give the container --shm-size=256m (Docker), or an "
        "emptyDir with medium: Memory at /dev/shm (Kubernetes); it goes to the disk meanwhile"
    )
