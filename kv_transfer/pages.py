"""A KV cache as rows of pages, and the moves that a transfer makes on them.

A page is K or V of one block in one layer, the longest run that is contiguous for one block, or a
part of it where the other cache has another shape (`reshape`). A row is the pages of one layer's K
or V. `HostPages` works on CPU memory through numpy, row by row
in chunks that stay in the core's cache, so that a byte is copied and hashed while it is warm;
`DevicePages` does the same with torch on any device. Both give the bytes of a span in plan
order, whatever the block ids.

Shape letters: L layers, N blocks of the cache, S slots of a block, K KV heads, D head size.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from core.link import Span

# A chunk is copied, then hashed while source and copy still lie in a 1 MiB second-level cache.
# Copy first: 4.9 GB/s for both, hash first 4.4, copy alone 6.0 (2026-11-30, one core).
CHUNK_BYTES = 256 * 1024

Selector = slice | np.ndarray[tuple[int], np.dtype[np.intp]]


class HostPages:
    """Pages of a cache in CPU memory. Holds a reference to the tensor's storage.

    The caches of further ranks may lie behind this one in the storage: pages past the end of a row
    are theirs.
    """

    def __init__(self, cache_L2NSKD: torch.Tensor) -> None:
        num_layers, two, self._num_row_pages = cache_L2NSKD.shape[:3]
        self.page_bytes = cache_L2NSKD[0, 0, 0].nbytes
        page = np.dtype((np.void, self.page_bytes))
        self._pages = flat_pages(cache_L2NSKD).view(torch.uint8).reshape(-1).numpy().view(page)
        self._num_reached = len(self._pages) - (num_layers * two - 1) * self._num_row_pages
        chunk_pages = max(1, CHUNK_BYTES // self.page_bytes)
        self._chunk_pages = chunk_pages
        self._scratch = np.empty(chunk_pages, dtype=page)

    def gather(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy the span's pages into `staging` (uint8, plan order); their checksum."""
        staged = self._staged(staging)
        digest = xxhash.xxh3_64()
        for row, start, selector in self._chunks(span, block_ids):
            part = staged[start : start + _length(selector)]
            self._read(row, selector, part)
            digest.update(_bytes_of(part))
        return digest.intdigest()

    def scatter(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy `staging` (uint8, plan order) into the span's pages; the checksum of `staging`."""
        staged = self._staged(staging)
        digest = xxhash.xxh3_64()
        for row, start, selector in self._chunks(span, block_ids):
            part = staged[start : start + _length(selector)]
            self._row(row)[selector] = part
            digest.update(_bytes_of(part))
        return digest.intdigest()

    def checksum(self, span: Span, block_ids: Sequence[int]) -> int:
        """Checksum of the span's pages where they lie."""
        digest = xxhash.xxh3_64()
        for row, _, selector in self._chunks(span, block_ids):
            digest.update(_bytes_of(self._warm(row, selector)))
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
        targets = self._chunks(span, target_block_ids)
        for (row, _, selector), (_, _, target_selector) in zip(
            self._chunks(span, block_ids), targets, strict=True
        ):
            pages = self._warm(row, selector)
            target._row(row)[target_selector] = pages
            digest.update(_bytes_of(pages))
        return digest.intdigest()

    def _row(self, row: int) -> Any:  # numpy cannot type void pages
        start = row * self._num_row_pages
        return self._pages[start : start + self._num_reached]

    def _staged(self, staging: torch.Tensor) -> Any:  # numpy cannot type void pages
        return staging.numpy().view(self._pages.dtype)

    def _chunks(self, span: Span, block_ids: Sequence[int]) -> Iterator[tuple[int, int, Selector]]:
        """(row, first page in plan order, cache blocks) of each part of the span."""
        ids = np.asarray(block_ids, dtype=np.intp)
        parts = [
            _selector(ids[start : start + self._chunk_pages])
            for start in range(0, len(ids), self._chunk_pages)
        ]
        position = 0
        for row in range(2 * span.layers.start, 2 * span.layers.stop):
            for selector in parts:
                yield row, position, selector
                position += _length(selector)

    def _read(self, row: int, selector: Selector, out: Any) -> None:
        if isinstance(selector, slice):
            out[:] = self._row(row)[selector]
        else:
            np.take(self._row(row), selector, out=out, mode="clip")

    def _warm(self, row: int, selector: Selector) -> Any:
        """The pages as one contiguous run: in place if they are one, else copied to scratch."""
        if isinstance(selector, slice):
            return self._row(row)[selector]
        scratch = self._scratch[: len(selector)]
        self._read(row, selector, scratch)
        return scratch


class DevicePages:
    """Pages of a cache on any device, moved by torch on the device's current stream.

    The checksum is computed on the device, by `tensor_checksum`: fetching the bytes for a hash
    on the host would cost more than the transfer.
    """

    def __init__(self, cache_L2NSKD: torch.Tensor) -> None:
        num_layers, two, num_blocks = cache_L2NSKD.shape[:3]
        # int64 elements: index_select on uint8 runs at a tenth of the speed (2026-11-30).
        self._pages_L2NE = cache_L2NSKD.view(torch.int64).view(num_layers, two, num_blocks, -1)

    def gather(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy the span's pages into `staging` (uint8, plan order); their checksum."""
        layers = self._pages_L2NE[span.layers.start : span.layers.stop]
        staged = staging.view(torch.int64).view(*layers.shape[:2], len(block_ids), -1)
        torch.index_select(layers, 2, self._index(block_ids), out=staged)
        return tensor_checksum(staging)

    def scatter(self, span: Span, block_ids: Sequence[int], staging: torch.Tensor) -> int:
        """Copy `staging` (uint8, plan order) into the span's pages; the checksum of `staging`."""
        layers = self._pages_L2NE[span.layers.start : span.layers.stop]
        staged = staging.view(torch.int64).view(*layers.shape[:2], len(block_ids), -1)
        layers.index_copy_(2, self._index(block_ids), staged)
        return tensor_checksum(staging)

    def checksum(self, span: Span, block_ids: Sequence[int]) -> int:
        """Checksum of the span's pages where they lie; waits for the stream."""
        layers = self._pages_L2NE[span.layers.start : span.layers.stop]
        pages = torch.index_select(layers, 2, self._index(block_ids))
        return tensor_checksum(pages.view(-1).view(torch.uint8))

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._pages_L2NE.device)


Pages = HostPages | DevicePages


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


def pages_of(cache_L2NSKD: torch.Tensor) -> Pages:
    """The cache's pages, wherever it lies."""
    is_host = cache_L2NSKD.device.type == "cpu"
    return HostPages(cache_L2NSKD) if is_host else DevicePages(cache_L2NSKD)


def tensor_checksum(data: torch.Tensor) -> int:
    """64-bit checksum of a uint8 tensor of whole 8-byte words, computed where it lies.

    The sum modulo 2**64 of each word times an odd factor that depends on its position. An odd
    factor is invertible, so a change of one word always changes the sum; moved and swapped words
    change it unless their difference cancels modulo 2**64.
    """
    words = data.view(torch.int64)
    positions = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    factors = positions * -7046029254386353130 + -7046029254386353131
    return int((words * factors).sum().item()) % 2**64


def _selector(block_ids: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Selector:
    """The ids as a slice if they are one rising run: a plain copy instead of an indexed one."""
    first = int(block_ids[0])
    if np.array_equal(block_ids, np.arange(first, first + len(block_ids))):
        return slice(first, first + len(block_ids))
    return block_ids


def _length(selector: Selector) -> int:
    return selector.stop - selector.start if isinstance(selector, slice) else len(selector)


def _bytes_of(pages: Any) -> Any:  # numpy cannot type void pages
    return pages.view(np.uint8)
