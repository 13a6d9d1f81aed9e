"""Each piece of a handoff, from the link's begin to decode's word that it has it."""

from core.link import Piece, Span
from kv_link.pushes import Pushes


def piece(index, first_layer, num_bytes=64):
    return Piece("r", 1, index, Span(first_layer, 2, 0, 3), num_bytes, checksum=0)


def test_a_piece_is_told_once_it_is_acknowledged_and_only_once():
    pushes = Pushes(block_size=16)
    pushes.sent(piece(0, first_layer=0), 1.0)
    pushes.sent(piece(1, first_layer=2), 2.0)
    pushes.acknowledged(1, 4.0)
    pushes.acknowledged(1, 5.0)
    pushes.acknowledged(7, 5.0)
    (push,) = pushes.all()
    assert (push.begin_s, push.end_s, push.index) == (2.0, 4.0, 1)
    assert (push.first_layer, push.num_layers, push.num_tokens, push.num_bytes) == (2, 2, 48, 64)
