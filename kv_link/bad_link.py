"""A link that loses and delays pieces, where `chaos` orders it.

What it does to a piece it does before the real sender has it: a lost one is not sent, though the
worker goes on to say that it was, with the checksum of nothing, which decode must refuse.
"""

import random
import time
from collections.abc import Sequence

from core.chaos import ChaosConfig
from core.link import PieceId, Span
from kv_transfer.backend import Sender

NOTHING_CHECKSUM = 0


class BadSender:
    """A sender that loses and delays pieces."""

    def __init__(self, sender: Sender, chaos: ChaosConfig) -> None:
        self._sender = sender
        self._chaos = chaos
        self._draw = random.Random(chaos.seed)

    @property
    def max_piece_bytes(self) -> int:
        """As the real sender has it."""
        return self._sender.max_piece_bytes

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
        if self._chaos.piece_delay_s:
            time.sleep(self._chaos.piece_delay_s)
        if self._draw.random() < self._chaos.lost_pieces:
            return NOTHING_CHECKSUM
        return self._sender.send(piece_id, span, source_block_ids, target_block_ids)

    def acknowledge(self, piece_id: PieceId) -> None:
        """As the real sender does; it takes no notice of a piece that it does not know."""
        self._sender.acknowledge(piece_id)

    def close(self) -> None:
        """As the real sender does."""
        self._sender.close()
