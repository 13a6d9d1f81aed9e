"""Token ids of one answer, as they arrive -> text that is final.

A token may end in the middle of a character; its text is held back until the character is whole.
What `push` and `finish` returned, joined, is what `Tokenizer.decode` gives for all ids at once,
whatever the ids are. Stop strings and transport are not known here.

One Detokenizer per answer, used by one task at a time. Cost per token does not depend on how much
was pushed before:

byte-level vocabularies   bytes go through an incremental UTF-8 decoder: at most 3 are held back
all others                the library's DecodeStream, which decodes a window of the last tokens;
                          a run of byte-fallback tokens is held back until it ends, since one bad
                          byte changes the text of the whole run
"""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from router.text.tokenizer import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


class Detokenizer:
    """The text of one answer; `finish` is called once, after the last `push`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin an answer of the model that `tokenizer` belongs to."""
        pieces = tokenizer.pieces
        self._decoder: _Decoder = (
            _WindowDecoder(tokenizer) if pieces is None else _ByteDecoder(pieces)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these ids; may be empty, never holds half a character."""
        return self._decoder.push(token_ids)

    def finish(self) -> str:
        """The rest; an unfinished character becomes U+FFFD."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """Ids are bytes, and bytes are UTF-8.

    Python's "replace" and the library's lossy reading agree on invalid input: one U+FFFD for each
    maximal part of a character (Unicode 16, section 3.9, recommended practice).
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        known = [i for i in token_ids if i < len(self._pieces)]
        return self._utf8.decode(b"".join(self._pieces[i] for i in known))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Ids of any vocabulary; keeps all ids for the one full decoding at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_streamed = 0
        self._num_characters = 0

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self._ends_byte_run(token_id):
                text += self._step()
        self._num_characters += len(text)
        return text

    def finish(self) -> str:
        return self._tokenizer.decode(self._token_ids)[self._num_characters :]

    def _step(self) -> str:
        fresh = self._token_ids[self._num_streamed :]
        self._num_streamed = len(self._token_ids)
        return self._stream.step(self._tokenizer.backend, fresh) or ""

    def _ends_byte_run(self, token_id: int) -> bool:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or token in self._tokenizer.special_token_ids:
            return False
        return not _BYTE_FALLBACK.fullmatch(token)
