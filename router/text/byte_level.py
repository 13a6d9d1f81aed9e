"""What each token id of a byte-level BPE vocabulary stands for, in bytes, and what follows.

Such vocabularies (GPT-2 and most since) write every byte as one printable character, so decoding
is joining bytes and reading them as UTF-8. It follows how much text one token can cover at most.
Built once per tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

_MOST_COMPOSED_BY_NFC = 4  # code points in the longest canonical decomposition of one
_ASCII = range(0x80)
_CONTINUATION_BYTES = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class LengthBound:
    """One token covers at most `most_characters`; ASCII in `vanishing` becomes no token at all."""

    most_characters: int
    vanishing: Mapping[int, None]

    def fewest_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this."""
        num_characters = len(text.translate(self.vanishing) if self.vanishing else text)
        return -(-num_characters // self.most_characters)


def length_bound(
    backend: tokenizers.Tokenizer, pieces: Sequence[bytes] | None
) -> LengthBound | None:
    """The bound for a vocabulary with these pieces; None when there is none.

    Every character that is not ASCII ends in a continuation byte, so if all of those are tokens,
    only ASCII can vanish, and a token of n bytes covers at most n characters.
    """
    added = backend.get_added_tokens_decoder().values()
    if pieces is None or any(token.lstrip or token.rstrip for token in added):
        return None
    single = {piece[0] for piece in pieces if len(piece) == 1}
    if not single.issuperset(_CONTINUATION_BYTES):
        return None
    longest = max([*map(len, pieces), *(len(token.content) for token in added)])
    vanishing = {byte: None for byte in _ASCII if byte not in single}
    match backend.normalizer:
        case None:
            return LengthBound(longest, vanishing)
        case normalizers.NFC():
            return LengthBound(longest * _MOST_COMPOSED_BY_NFC, vanishing)
        case _:
            return None


def byte_pieces(backend: tokenizers.Tokenizer) -> tuple[bytes, ...] | None:
    """The bytes of each id's text; None unless decoding is plain joining of bytes.

    Control tokens and ids without a token have no bytes.
    """
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    byte_of = _byte_of_character()
    for token, token_id in vocabulary.items():
        if token_id not in special:
            pieces[token_id] = _token_bytes(token, byte_of)
    return tuple(pieces)


def _token_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode("utf-8")  # an added token that is not spelled in the byte alphabet


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest moves up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(moved)}
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet
