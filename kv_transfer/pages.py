"""A KV cache as rows of pages, and the moves that a transfer makes on them.

A page is K or V of one block in one layer, the longest run that is contiguous for one block, or a
part of it where the other cache has another shape (`reshape`). A row is the pages of one layer's K
or V. `HostPages` works on CPU memory through numpy, row by row
in chunks that stay in the core's cache, so that a byte is copied and hashed while it is warm;
`cuda.device_pages` does the same with torch on any device. Both give the bytes of a span in plan
order, whatever the block ids.

Shape letters: L layers, N blocks of the cache, S slots of a block, K KV heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from core.link import Span
from kv_transfer.streaming import LINE_BYTES, Ids, stream_pages

# A chunk is copied, then hashed while it still lies in the core's second-level cache. Hashed first,
# it takes a fourth longer, unless it lay in the third-level cache before (2026-11-30, one core).
CHUNK_BYTES = 384 * 1024

# Shorter runs are copied by numpy, which is called faster.
MIN_STREAMED_BYTES = 32 * 1024

Bytes = Any  # a numpy array of uint8, which xxhash's types do not take


@dataclass(frozen=True, slots=True)
class Part:
    """Pages [start, stop) in plan order of each of these rows; all pages if there are several."""

    rows: range
    start: int
    stop: int

    @property
    def num_pages(self) -> int:
        """Pages of all rows."""
        return len(self.rows) * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some pages of every row, as cache blocks; `first` is the first of them if they are a run."""

    block_ids: Ids
    first: int | None
    num_bytes: int


class HostPages:
    """Pages of a cache in CPU memory. Holds a reference to the tensor's storage.

    The caches of further ranks may lie behind this one in the storage: pages past the end of a row
    are theirs.
    """

    def __init__(self, cache_L2NSKD: torch.Tensor) -> None:
        num_layers, two, self._num_row_pages = cache_L2NSKD.shape[:3]
        self.page_bytes = cache_L2NSKD[0, 0, 0].nbytes
        page = np.dtype((np.void, self.page_bytes))
        self._bytes: Bytes = flat_pages(cache_L2NSKD).view(torch.uint8).reshape(-1).numpy()
        self._pages = self._bytes.view(page)
        self._num_reached = len(self._pages) - (num_layers * two - 1) * self._num_row_pages
        self._chunk_pages = max(1, CHUNK_BYTES // self.page_bytes)
        self._scratch = np.empty(self._chunk_pages * self.page_bytes, dtype=np.uint8)
        misaligned = self._bytes.ctypes.data % LINE_BYTES, self.page_bytes % LINE_BYTES
        self._is_streamed = misaligned == (0, 0)

    def gather(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy the span's pages into `staging` (uint8, plan order); their checksum."""
        digest = xxhash.xxh3_64()
        for row, chunk, part in self._staged(span, block_ids, staging):
            self._read(row, chunk, part)
            digest.update(part)
        return digest.intdigest()

    def scatter(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy `staging` (uint8, plan order) into the span's pages; the checksum of `staging`."""
        digest = xxhash.xxh3_64()
        for row, chunk, part in self._staged(span, block_ids, staging):
            self._write(row, chunk, part)
            digest.update(part)
        return digest.intdigest()

    def checksum(self, span: Span, block_ids: Sequence[int]) -> int:
        """Checksum of the span's pages where they lie."""
        digest = xxhash.xxh3_64()
        chunks = self._chunks(block_ids)
        for row in _rows_of(span):
            for chunk in chunks:
                digest.update(self._together(row, chunk))
        return digest.intdigest()

    def copy_to(
        self,
        target: "HostPages",
        span: Span,
        block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Copy the span's pages into `target_block_ids` of another cache; their checksum."""
        digest = xxhash.xxh3_64()
        chunks, target_chunks = self._chunks(block_ids), target._chunks(target_block_ids)
        for row in _rows_of(span):
            for chunk, target_chunk in zip(chunks, target_chunks, strict=True):
                pages = self._together(row, chunk)
                target._write(row, target_chunk, pages)
                digest.update(pages)
        return digest.intdigest()

    def view(self, part: Part, block_ids: Sequence[int]) -> torch.Tensor | None:
        """The bytes of a part where they lie; None if they do not lie together."""
        chunk = self._chunk(block_ids[part.start : part.stop])
        if len(part.rows) > 1 or chunk.first is None:
            return None
        return torch.from_numpy(self._together(part.rows.start, chunk))

    def read(self, part: Part, block_ids: Sequence[int], data: torch.Tensor) -> None:
        """Copy the bytes of a part, in plan order, to `data`."""
        chunk = self._chunk(block_ids[part.start : part.stop])
        for row, pages in zip(part.rows, np.split(data.numpy(), len(part.rows)), strict=True):
            self._read(row, chunk, pages)

    def write(self, part: Part, block_ids: Sequence[int], data: torch.Tensor) -> None:
        """Put the bytes of a part, in plan order, where they belong."""
        chunk = self._chunk(block_ids[part.start : part.stop])
        for row, pages in zip(part.rows, np.split(data.numpy(), len(part.rows)), strict=True):
            self._write(row, chunk, pages)

    def _staged(
        self, span: Span, block_ids: Sequence[int], staging: torch.Tensor
    ) -> Iterator[tuple[int, _Chunk, Bytes]]:
        """(row, chunk, its bytes in `staging`) of the whole span."""
        chunks, start = self._chunks(block_ids), 0
        staged: Bytes = staging.numpy()
        for row in _rows_of(span):
            for chunk in chunks:
                yield row, chunk, staged[start : start + chunk.num_bytes]
                start += chunk.num_bytes

    def _chunks(self, block_ids: Sequence[int]) -> list[_Chunk]:
        """Cuts a row, as evenly as can be."""
        num_parts = -(-len(block_ids) // self._chunk_pages)
        edges = [len(block_ids) * part // num_parts for part in range(num_parts + 1)]
        return [self._chunk(block_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]

    def _chunk(self, block_ids: Sequence[int]) -> _Chunk:
        ids = np.array(block_ids, dtype=np.intp)
        first, last = int(ids[0]), int(ids[-1])
        if ids.min() < 0 or ids.max() >= self._num_reached:
            raise IndexError(f"blocks {ids.min()} to {ids.max()} of {self._num_reached}")
        is_run = last - first == len(ids) - 1 and np.array_equal(ids, np.arange(first, last + 1))
        return _Chunk(ids, first if is_run else None, len(ids) * self.page_bytes)

    def _together(self, row: int, chunk: _Chunk) -> Bytes:
        """The chunk's bytes as one run: in place if they are one, else copied to scratch."""
        if chunk.first is not None:
            start = (row * self._num_row_pages + chunk.first) * self.page_bytes
            return self._bytes[start : start + chunk.num_bytes]
        scratch = self._scratch[: chunk.num_bytes]
        self._read(row, chunk, scratch)
        return scratch

    def _read(self, row: int, chunk: _Chunk, out: Bytes) -> None:
        if chunk.first is not None:
            out[:] = self._together(row, chunk)
        else:
            pages = out.view(self._pages.dtype)
            np.take(self._row(row), chunk.block_ids, out=pages, mode="clip")

    def _write(self, row: int, chunk: _Chunk, pages: Bytes) -> None:
        if self._is_streamed and chunk.num_bytes >= MIN_STREAMED_BYTES:
            start = row * self._num_row_pages * self.page_bytes
            stream_pages(self._bytes, start, chunk.block_ids, self.page_bytes, pages, 0)
        elif chunk.first is not None:
            self._together(row, chunk)[:] = pages
        else:
            self._row(row)[chunk.block_ids] = pages.view(self._pages.dtype)

    def _row(self, row: int) -> Any:  # numpy cannot type void pages
        start = row * self._num_row_pages
        return self._pages[start : start + self._num_reached]


def view_as_pages(cache_L2NSKD: torch.Tensor, num_pages_per_block: int) -> torch.Tensor:
    """The cache with its blocks cut into pages: L x 2 x pages x elements."""
    num_layers, two, num_blocks = cache_L2NSKD.shape[:3]
    return cache_L2NSKD.view(num_layers, two, num_blocks * num_pages_per_block, -1)


def flat_pages(cache_L2NSKD: torch.Tensor) -> torch.Tensor:
    """Pages x elements, from the cache's first page to the end of its storage."""
    page_elements = cache_L2NSKD[0, 0, 0].numel()
    first = cache_L2NSKD.storage_offset()
    num_elements = cache_L2NSKD.untyped_storage().nbytes() // cache_L2NSKD.itemsize - first
    shape = (num_elements // page_elements, page_elements)
    return torch.as_strided(cache_L2NSKD, shape, (page_elements, 1), first)


def _rows_of(span: Span) -> range:
    return range(2 * span.layers.start, 2 * span.layers.stop)
