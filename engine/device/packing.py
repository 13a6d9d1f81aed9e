"""The arrays of a step in one buffer: a card gets them in one copy instead of ten.

Pure bookkeeping of places; each array starts at a multiple of ALIGNMENT_BYTES.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Array

ALIGNMENT_BYTES = 16


def places_of(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array starts in one buffer that holds them all, and its size, in bytes."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def pack(arrays: Sequence[Array], buffer: torch.Tensor) -> None:
    """Copy the arrays into a CPU buffer, each to its place."""
    memory = buffer.numpy()
    for array, offset in zip(arrays, places_of(arrays)[0], strict=True):
        memory[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()


def views_of(arrays: Sequence[Array], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The packed arrays as tensors on top of a buffer of any device."""
    views = []
    for array, offset in zip(arrays, places_of(arrays)[0], strict=True):
        part = buffer[offset : offset + array.nbytes]
        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        views.append(part.view(dtype).view(array.shape))
    return views
