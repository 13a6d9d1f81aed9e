"""Large pieces over gloo: sent from one cache and received into the other, without staging.

Staging costs a copy at both ends, and a gloo send holds a lock for as long as the kernel takes its
bytes, for which gloo's own thread spins when news arrive. Here neither happens: each run of pages
is a message of its own, the receiver posts them all when it knows the piece, and gloo's threads do
the rest while this one hashes (2026-11-30, two cores, 92 MiB: 64 ms of processor time, staged 117).

Both ends cut a piece alike, by its shape only. What does not lie together at one end is gathered or
scattered there, message by message; the other end does not notice.

The source is read until the piece is acknowledged. The target is written while `take` runs and not
after: it returns when the last byte is there, and it fails when gloo has closed the connection.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch._C._distributed_c10d import Work

from core.link import Span
from kv_transfer.pages import HostPages, Part
from kv_transfer.torch_pair import DECODE, PREFILL

MAX_PIECE_BYTES = 16 << 20
MESSAGE_BYTES = 1 << 20
# Shorter runs are not worth a message each: it costs gloo some 15 us at both ends.
MIN_RUN_BYTES = 256 << 10
# gloo takes a timeout of 0 for none at all.
LEAST_WAIT_S = 1e-3

_TAG = 1


@dataclass(frozen=True, slots=True)
class Sent:
    """A piece on its way: a work that is dropped is cancelled. `buffers` are free afterwards."""

    checksum: int
    works: tuple[Work, ...]
    buffers: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Arrival:
    part: Part
    data: torch.Tensor
    buffer: torch.Tensor | None
    work: Work


class Messages:
    """One end of a link, as far as it moves large pieces. One thread sends or takes.

    A piece that is not whole `timeout_s` after it was asked for has failed, and so has the group.
    """

    def __init__(self, pages: HostPages, timeout_s: float) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        self._buffers: list[torch.Tensor] = []

    def send(self, group: Any, span: Span, block_ids: Sequence[int]) -> Sent:
        """Post the sends of a piece; raises RuntimeError if the group failed."""
        digest = xxhash.xxh3_64()
        works, buffers = [], []
        for part in cut(span, self._pages.page_bytes):
            data = self._pages.view(part, block_ids)
            if data is None:
                buffers.append(self._buffer())
                data = buffers[-1][: part.num_pages * self._pages.page_bytes]
                self._pages.read(part, block_ids, data)
            # Before it is sent, so that the kernel finds it in the core's cache.
            digest.update(_bytes_of(data))
            works.append(group.send([data], DECODE, _TAG))
        return Sent(digest.intdigest(), tuple(works), tuple(buffers))

    def release(self, sent: Sent) -> None:
        """The piece was acknowledged. Contract: may be called from another thread."""
        self._buffers.extend(sent.buffers)

    def take(self, group: Any, span: Span, block_ids: Sequence[int]) -> int:
        """Receive a piece into its pages; the checksum of what arrived.

        Raises:
            RuntimeError: the group failed, or the piece was not whole within the timeout.
        """
        digest = xxhash.xxh3_64()
        arrivals: deque[_Arrival] = deque()
        try:
            for part in cut(span, self._pages.page_bytes):
                arrivals.append(self._post(group, part, block_ids))
            until_s = time.monotonic() + self._timeout_s
            while arrivals:
                _wait(arrivals[0].work, until_s)
                arrival = arrivals.popleft()
                if arrival.buffer is not None:
                    self._pages.write(arrival.part, block_ids, arrival.data)
                    self._buffers.append(arrival.buffer)
                digest.update(_bytes_of(arrival.data))
        finally:
            # A traceback may hold this frame for long; gloo writes for as long as there is a work.
            arrivals.clear()
        return digest.intdigest()

    def throw_away(self, group: Any, span: Span) -> None:
        """Receive a piece into nothing; raises as `take`."""
        buffer, page_bytes = self._buffer(), self._pages.page_bytes
        sizes = [part.num_pages * page_bytes for part in cut(span, page_bytes)]
        works = [group.recv([buffer[:size]], PREFILL, _TAG) for size in sizes]
        until_s = time.monotonic() + self._timeout_s
        for work in works:
            _wait(work, until_s)

    def _post(self, group: Any, part: Part, block_ids: Sequence[int]) -> _Arrival:
        data, buffer = self._pages.view(part, block_ids), None
        if data is None:
            buffer = self._buffer()
            data = buffer[: part.num_pages * self._pages.page_bytes]
        return _Arrival(part, data, buffer, group.recv([data], PREFILL, _TAG))

    def _buffer(self) -> torch.Tensor:
        # Kept for the next piece: to touch new memory costs more than to copy.
        if self._buffers:
            return self._buffers.pop()
        return torch.empty(max(MESSAGE_BYTES, self._pages.page_bytes), dtype=torch.uint8)


def cut(span: Span, page_bytes: int) -> list[Part]:
    """The messages of a piece, whose blocks are pages, in plan order."""
    rows, num_pages = range(2 * span.layers.start, 2 * span.layers.stop), span.num_blocks
    if num_pages * page_bytes < MIN_RUN_BYTES:
        step = MESSAGE_BYTES // (num_pages * page_bytes)
        return [Part(rows[row : row + step], 0, num_pages) for row in range(0, len(rows), step)]
    num_parts = -(-num_pages // max(1, MESSAGE_BYTES // page_bytes))
    edges = [num_pages * part // num_parts for part in range(num_parts + 1)]
    return [
        Part(range(row, row + 1), start, stop)
        for row in rows
        for start, stop in zip(edges, edges[1:], strict=False)
    ]


def _wait(work: Work, until_s: float) -> None:
    work.wait(timedelta(seconds=max(until_s - time.monotonic(), LEAST_WAIT_S)))


def _bytes_of(data: torch.Tensor) -> Any:  # torch does not type what its arrays hold
    return data.numpy()
