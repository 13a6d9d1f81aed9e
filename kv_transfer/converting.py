"""A sender whose cache has another number format than the target.

Converts the pages of each piece into a small cache of the target's format, from which the real
sender sends them; so it serves every backend and device, at the price of one more copy.
"""

from collections.abc import Callable, Sequence

import torch

from core.link import PieceId, Span
from kv_transfer.backend import STAGED_PIECE_BYTES, Sender
from kv_transfer.pages import flat_pages

MAX_PIECE_BYTES = 1024 * 1024

Connect = Callable[[torch.Tensor], Sender]


class ConvertingSender:
    """Sends the pages of `cache_L2NSKD` in the format `dtype`.

    connect(cache) makes the real sender; a span of one layer has at most `num_pages` pages, those
    of one block or of MAX_PIECE_BYTES.
    """

    def __init__(
        self,
        cache_L2NSKD: torch.Tensor,
        dtype: torch.dtype,
        *,
        num_block_pages: int,
        connect: Connect,
    ) -> None:
        num_layers, two, self._num_row_pages = cache_L2NSKD.shape[:3]
        self._pages_PE = flat_pages(cache_L2NSKD)
        page_bytes = self._pages_PE.shape[1] * dtype.itemsize
        num_pages = max(num_block_pages, MAX_PIECE_BYTES // (2 * page_bytes))
        # One buffer for all pieces, which are small enough that `send` has read it on return.
        self._converted = cache_L2NSKD.new_zeros(
            num_layers, two, num_pages, self._pages_PE.shape[1], dtype=dtype
        )
        self._num_buffer_bytes = 2 * num_pages * page_bytes
        self._sender = connect(self._converted)

    @property
    def max_piece_bytes(self) -> int:
        """What the buffer takes of one layer, if the real sender stages as much."""
        return min(self._num_buffer_bytes, self._sender.max_piece_bytes, STAGED_PIECE_BYTES)

    def has_room(self) -> bool:
        """As the real sender has it."""
        return self._sender.has_room()

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Convert the piece, then send it; the checksum of its converted bytes."""
        num_pages = len(source_block_ids)
        rows = torch.arange(2 * span.layers.start, 2 * span.layers.stop) * self._num_row_pages
        index = rows[:, None] + torch.as_tensor(source_block_ids)
        found = self._pages_PE.index_select(0, index.flatten().to(self._pages_PE.device))
        buffer = self._converted[span.layers.start : span.layers.stop, :, :num_pages]
        buffer.copy_(found.view(buffer.shape))
        return self._sender.send(piece_id, span, range(num_pages), target_block_ids)

    def acknowledge(self, piece_id: PieceId) -> None:
        """As the real sender does."""
        self._sender.acknowledge(piece_id)

    def close(self) -> None:
        """As the real sender does."""
        self._sender.close()
