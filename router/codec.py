"""Prompts to token ids and back, for callers who want no answer: the same rules as for requests.

Runs in the router's event loop; the work itself in a thread.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.request import Limits, Prompt, check_model, check_output_ids, token_ids_of
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer


class Codec:
    """Stateless; `limits` tells what the cluster can serve now, or raises PeerLost."""

    def __init__(self, tokenizer: Tokenizer, limits: Callable[[], Limits]) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    async def encode(self, prompt: Prompt, model: str) -> tuple[int, ...]:
        """The ids that a request with this prompt would be served for.

        Raises:
            InvalidRequest: as for such a request.
        """
        limits = self._limits()
        check_model(model, limits)
        return await asyncio.to_thread(token_ids_of, prompt, self._tokenizer, limits)

    async def decode(self, token_ids: Sequence[int], model: str) -> str:
        """The text of an answer of these tokens.

        Raises:
            InvalidRequest: there are more than the context holds, or one is no token.
        """
        limits = self._limits()
        check_model(model, limits)
        check_output_ids(token_ids, limits)
        return await asyncio.to_thread(self._text_of, token_ids)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._tokenizer)
        return detokenizer.push(token_ids) + detokenizer.finish()
