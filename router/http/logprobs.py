"""Log-probabilities in OpenAI's two shapes: a list of objects for chats, parallel lists for texts.

A token's bytes may be part of a character; its text then shows U+FFFD, as OpenAI's does. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any  # values of JSON

from core.completion import Chunk
from core.request import Logprobs

Json = dict[str, Any]
BytesOf = Callable[[int], bytes]


def chat_logprobs(chunks: Sequence[Chunk], bytes_of: BytesOf) -> Json:
    """`choices[].logprobs` of a chat, for the tokens of some chunks."""
    return {
        "content": [
            _entry(token_id, logprobs.chosen, bytes_of)
            | {"top_logprobs": [_entry(i, logprob, bytes_of) for i, logprob in logprobs.top]}
            for token_id, logprobs in _tokens(chunks)
        ],
        "refusal": None,
    }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is told with its answers: ids, the text of each, and, if asked for, logprobs.

    logprobs begin with the second token, as nothing tells how likely the first one is; None when
    they were not asked for.
    """

    token_ids: Sequence[int]
    pieces: Sequence[str]
    logprobs: Sequence[Logprobs] | None = None

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(self.pieces)

    def told(self, bytes_of: BytesOf) -> Json | None:
        """`choices[].logprobs` of a text, for the tokens of the prompt; None if not asked for."""
        if self.logprobs is None:
            return None
        chunks = [
            Chunk(piece, (token_id,), logprobs=(logprobs,))
            for piece, token_id, logprobs in zip(
                self.pieces[1:], self.token_ids[1:], self.logprobs, strict=True
            )
        ]
        first = {
            "tokens": [_text(bytes_of(self.token_ids[0]))],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        return joined(first, text_logprobs(chunks, bytes_of, len(self.pieces[0])))


NO_ECHO = Echo((), ())


def joined(before: Json | None, after: Json | None) -> Json | None:
    """Parallel lists of two runs of tokens as those of one; either may be None."""
    if before is None or after is None:
        return before if after is None else after
    return {name: [*values, *after[name]] for name, values in before.items()}


def text_logprobs(chunks: Sequence[Chunk], bytes_of: BytesOf, text_offset: int) -> Json:
    """`choices[].logprobs` of a text; text_offset characters of the answer came before."""
    offsets = []
    for chunk in chunks:
        offsets += [text_offset] * len(chunk.token_ids)
        text_offset += len(chunk.text)
    tokens = _tokens(chunks)
    return {
        "tokens": [_text(bytes_of(token_id)) for token_id, _ in tokens],
        "token_logprobs": [logprobs.chosen for _, logprobs in tokens],
        # The chosen token is always among them, as OpenAI documents it.
        "top_logprobs": [
            {_text(bytes_of(i)): logprob for i, logprob in (*logprobs.top, (id_, logprobs.chosen))}
            for id_, logprobs in tokens
        ],
        "text_offset": offsets,
    }


def _tokens(chunks: Sequence[Chunk]) -> list[tuple[int, Logprobs]]:
    return [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]


def _entry(token_id: int, logprob: float, bytes_of: BytesOf) -> Json:
    data = bytes_of(token_id)
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
