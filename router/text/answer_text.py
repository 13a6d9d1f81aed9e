"""The text of one answer, cut before the first stop string.

Text that may be the beginning of a stop string is held back, and only that: it goes out as soon as
it cannot be one any more. Where tokens begin and end plays no part. What `push` and `finish`
returned, joined, is the whole answer's text up to the earliest end of a match, whatever the
batches were.

Knows no transport and no worker.
"""

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer


class StopStrings:
    """Finds the first of some strings in a text that comes in parts.

    Invariant: `held` is the longest end of the text so far that begins a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.match: str | None = None
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """What became final; once something matched, `match` tells what, and nothing follows."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            # The longest of those that end here: it begins first.
            ending = [stop for stop in self._stops if seen.endswith(stop, 0, end)]
            if ending:
                self.match = max(ending, key=len)
                self._held = ""
                return seen[: end - len(self.match)]
        num_held = max(self._overlap(seen, stop) for stop in self._stops)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held]

    def finish(self) -> str:
        """The rest: nothing that could complete a stop string will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
        most = min(len(text), len(stop) - 1)
        return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)


class AnswerText:
    """Token ids in, final text out; one per answer, `finish` is called once, at its end.

    The text of the first min_tokens tokens goes out as it is: a stop string may neither end nor
    begin in it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._num_unchecked_tokens = min_tokens

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: the answer ends with the token that completed it."""
        return self._stops.match is not None

    def push(self, token_id: int) -> str:
        """Text that became final with this token; often empty."""
        text = self._detokenizer.push([token_id])
        if self._num_unchecked_tokens > 0:
            self._num_unchecked_tokens -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The rest of the text, if no stop string ended it."""
        if self.is_stopped:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
