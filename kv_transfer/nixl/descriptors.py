"""Which addresses a one-sided write of a piece touches.

Pure arithmetic over block ids: the cache is [2L, N] pages, one row for K and one for V of each
layer, and blocks that follow each other at both ends become one write.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.link import Span

Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]
Descriptors = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Runs:
    """Blocks of a piece cut where either end's ids do not rise by one: first ids and lengths."""

    sources: Blocks
    targets: Blocks
    lengths: Blocks


def runs_of(source_block_ids: Sequence[int], target_block_ids: Sequence[int]) -> Runs:
    """The fewest runs that cover the blocks in order; there has to be at least one block."""
    sources = np.asarray(source_block_ids, dtype=np.int64)
    targets = np.asarray(target_block_ids, dtype=np.int64)
    breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return Runs(sources[starts], targets[starts], np.diff(np.append(starts, len(sources))))


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the pages of one cache lie in its owner's memory."""

    address: int
    page_bytes: int
    num_blocks: int
    device_id: int

    def rows(self, span: Span, first_blocks: Blocks, lengths: Blocks) -> Descriptors:
        """(address, bytes, device) of each run in each row of the span, in plan order."""
        rows = np.arange(2 * span.layers.start, 2 * span.layers.stop, dtype=np.int64)
        pages = rows[:, None] * self.num_blocks + first_blocks[None, :]
        descriptors = np.empty((pages.size, 3), dtype=np.uint64)
        descriptors[:, 0] = self.address + pages.reshape(-1) * self.page_bytes
        descriptors[:, 1] = np.tile(lengths, len(rows)) * self.page_bytes
        descriptors[:, 2] = self.device_id
        return descriptors
