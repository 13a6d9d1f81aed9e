"""What the two ends of a handoff say to each other; the words are those of `core.link`.

The stream keeps order and loses nothing while it lives; its end is the end of the link. Every
message names request and epoch, so that a late one can never be taken for another request's.
"""

from core.link import (
    Abort,
    AbortAck,
    Begin,
    Granted,
    Piece,
    PieceAck,
    Seal,
    Sealed,
    TransferRefused,
)

ToDecode = Begin | Piece | Seal | Abort | AbortAck
ToPrefill = Granted | PieceAck | Sealed | TransferRefused | Abort | AbortAck

__all__ = [
    "Abort",
    "AbortAck",
    "Begin",
    "Granted",
    "Piece",
    "PieceAck",
    "Seal",
    "Sealed",
    "ToDecode",
    "ToPrefill",
    "TransferRefused",
]
