"""The pieces of one handoff as events: when each was handed to the link and acknowledged.

Pure: facts and times in.
"""

from core.events.event import BoundedEvents, Event, EventKind
from core.link import Piece

# Neighbours are told together where there were more.
MAX_EVENTS = 32


class Pushes:
    """Of one handoff, so far; a piece that was never acknowledged is not told."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events = BoundedEvents(MAX_EVENTS)
        self._sent: dict[int, tuple[Piece, float]] = {}

    def sent(self, piece: Piece, started_s: float) -> None:
        """A piece was on the link since `started_s`."""
        self._sent[piece.index] = piece, started_s

    def acknowledged(self, index: int, now_s: float) -> None:
        """Decode took a piece off the link; a second time changes nothing."""
        sent = self._sent.pop(index, None)
        if sent is None:
            return
        piece, started_s = sent
        self._events.add(
            Event(
                EventKind.PUSH,
                started_s,
                now_s,
                index=index,
                num_tokens=piece.span.num_blocks * self._block_size,
                num_bytes=piece.num_bytes,
                first_layer=piece.span.first_layer,
                num_layers=piece.span.num_layers,
            )
        )

    def all(self) -> tuple[Event, ...]:
        """Those that were acknowledged, in order."""
        return self._events.all()
