"""Keeps what users type from becoming control tokens.

A chat template writes control tokens (`<|im_start|>`, ...) around user content in one string. To
tell its tokens from the same letters typed by a user, content is marked before rendering with a
character that occurs nowhere else, and the rendered text is split at unmarked control tokens.
Pure text in, text out; knows neither ids nor templates.
"""

import re
from collections.abc import Iterator, Sequence


class ControlTokens:
    """Finds control tokens in text, and marks those that users typed.

    A control token can come to stand in rendered text in three ways that involve user content:
    wholly inside it; beginning in it and ending in the template's text after it; ending in it and
    beginning in the template's text before it. `mark` puts the marker before the first two and
    inside the third. Content wholly inside a token (a role between the template's "<|" and "|>")
    is not covered, which is why roles are a closed set.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        """Prepare for the control tokens of one vocabulary."""
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._heads = {token[:n] for token in special_tokens for n in range(1, len(token))}
        self._tails = {token[n:] for token in special_tokens for n in range(1, len(token))}
        self._longest = max(map(len, special_tokens), default=0)

    def mark(self, content: str, *, marker: str) -> str:
        """`content` with `marker` at each place where a control token could arise."""
        places = sorted({*self._inside(content), *self._at_end(content), *self._at_start(content)})
        bounds = [0, *places, len(content)]
        return marker.join(content[a:b] for a, b in zip(bounds, bounds[1:], strict=False))

    def split(self, text: str, *, marker: str) -> Iterator[tuple[str, bool]]:
        """Pieces of `text` in order, each with whether it is an unmarked control token."""
        begin = position = 0
        while match := self._pattern.search(text, position):
            start, position = match.start(), match.start() + 1
            if start > 0 and text[start - 1] == marker:
                continue
            if start > begin:
                yield text[begin:start], False
            yield match[0], True
            begin = position = match.end()
        if begin < len(text):
            yield text[begin:], False

    def _inside(self, content: str) -> Iterator[int]:
        position = 0
        while match := self._pattern.search(content, position):
            yield match.start()
            position = match.start() + 1

    def _at_end(self, content: str) -> Iterator[int]:
        end = len(content.rstrip())  # templates may strip what they are given
        for length in range(1, min(self._longest, end + 1)):
            if content[end - length : end] in self._heads:
                yield end - length

    def _at_start(self, content: str) -> Iterator[int]:
        start = len(content) - len(content.lstrip())
        for length in range(1, min(self._longest, len(content) - start + 1)):
            if content[start : start + length] in self._tails:
                yield start
