"""A link that loses and delays pieces, or carries few bytes, where `chaos` orders it.

What it does to a piece it does before the real sender has it: a lost one is not sent, though the
worker goes on to say that it was, with the checksum of nothing, which decode must refuse.
"""

import random
import time
from collections.abc import Sequence

from core.link import PieceId, Span
from core.settings.chaos import ChaosConfig
from kv_transfer.backend import Sender

NOTHING_CHECKSUM = 0
# A slow link takes pieces of no more than so long, so that one piece holds nobody up.
MAX_PIECE_S = 0.25
MIN_PIECE_BYTES = 64 << 10


class BadSender:
    """A sender that loses, delays and slows down pieces; page_bytes are those of one page."""

    def __init__(self, sender: Sender, chaos: ChaosConfig, *, page_bytes: int) -> None:
        self._sender = sender
        self._chaos = chaos
        self._page_bytes = page_bytes
        self._draw = random.Random(chaos.seed)

    @property
    def max_piece_bytes(self) -> int:
        """As the real sender has it, or what a slow link carries in a moment."""
        rate = self._chaos.link_bytes_per_s
        if rate is None:
            return self._sender.max_piece_bytes
        return min(self._sender.max_piece_bytes, max(int(rate * MAX_PIECE_S), MIN_PIECE_BYTES))

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
        """The checksum of the piece, or of nothing if it is lost."""
        if delay_s := self._delay_s(span, len(source_block_ids)):
            time.sleep(delay_s)
        if self._draw.random() < self._chaos.lost_pieces:
            return NOTHING_CHECKSUM
        return self._sender.send(piece_id, span, source_block_ids, target_block_ids)

    def _delay_s(self, span: Span, num_pages: int) -> float:
        """What is waited before a piece: K and V of so many pages in each of its layers."""
        if self._chaos.link_bytes_per_s is None:
            return self._chaos.piece_delay_s
        num_bytes = 2 * span.num_layers * num_pages * self._page_bytes
        return self._chaos.piece_delay_s + num_bytes / self._chaos.link_bytes_per_s

    def acknowledge(self, piece_id: PieceId) -> None:
        """As the real sender does; it takes no notice of a piece that it does not know."""
        self._sender.acknowledge(piece_id)

    def close(self) -> None:
        """As the real sender does."""
        self._sender.close()
