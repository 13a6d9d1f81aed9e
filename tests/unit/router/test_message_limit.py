"""The limit of a message follows the context's length, within what gRPC and memory allow."""

import json

import pytest

from router.message_limit import MARGIN_BYTES, MAX_BYTES, MIN_BYTES, max_message_bytes
from router.message_limit import message_limit_of as limit_of


class Pieces:
    def __init__(self, pieces):
        self.pieces = pieces


@pytest.mark.parametrize(
    ("num_tokens", "token_bytes", "expected"),
    [
        (512, 16, MIN_BYTES),
        (131_072, 64, 131_072 * 64 + MARGIN_BYTES),
        (131_072, None, 131_072 * 128 + MARGIN_BYTES),
        (2_000_000, 1, 2_000_000 * 5 + MARGIN_BYTES),  # ids take more than so short a text
        (10_000_000, 128, MAX_BYTES),
    ],
)
def test_the_limit_is_what_a_prompt_can_need(num_tokens, token_bytes, expected):
    assert max_message_bytes(num_tokens, token_bytes) == expected


def test_length_and_bytes_come_from_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100_000}))
    assert limit_of(tmp_path, Pieces((b"a", b"b" * 100))) == 100_000 * 100 + MARGIN_BYTES


def test_a_checkpoint_that_does_not_tell_takes_the_usual(tmp_path):
    assert limit_of(tmp_path, Pieces(None)) == max_message_bytes(131_072, 128)
