"""Which tokens a grammar leaves, computed beside the forward pass.

A matcher (llguidance) reads the answer's tokens and tells which may follow. It is a function of
grammar and answer alone, so it need not move with a request: whoever samples the next token
builds it from the history, once, and then feeds it one token per step. `Grammars` keeps the most
recent ones.

One thread of its own does all the matching, while the device computes the logits that the masks
are for; a mask takes about 0.05 ms, a compilation 1 to 1,000 ms.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from core.errors import InvalidRequest, TwophaseError
from engine.batch import SequenceStep
from engine.sampling.logits import Mask

MAX_MATCHERS = 512
MAX_TOKENIZERS = 4

Masks = Mapping[int, "Future[Mask | TwophaseError]"]
_Key = tuple[str, tuple[int, ...], tuple[int, ...]]


class Grammars:
    """Matchers of one model's tokenizer; `masks` is called by one thread.

    Invariant: a kept matcher has read exactly the answer that its key holds.
    """

    def __init__(self, model_directory: Path, vocab_size: int) -> None:
        self._tokenizer_path = model_directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizers: OrderedDict[tuple[int, ...], LLTokenizer] = OrderedDict()
        self._matchers: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def masks(self, steps: Sequence[SequenceStep]) -> Masks:
        """By index of the step, what may follow it, or why that cannot be told; started here."""
        return {
            index: self._thread.submit(self._mask, step)
            for index, step in enumerate(steps)
            if step.sampling is not None and step.sampling.grammar is not None
        }

    def _mask(self, step: SequenceStep) -> Mask | TwophaseError:
        assert step.sampling is not None and step.sampling.grammar is not None
        assert step.history is not None
        grammar, stops = step.sampling.grammar, step.sampling.stop_token_ids
        answer = tuple(step.history.output_token_ids)
        try:
            matcher = self._matcher((grammar, stops, answer))
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        except TwophaseError as error:
            return error
        if matcher.is_error():
            return _refusal(matcher)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def _matcher(self, key: _Key) -> LLMatcher:
        grammar, stops, answer = key
        matcher = self._matchers.pop(key, None)
        if matcher is None and answer:
            matcher = self._matchers.pop((grammar, stops, answer[:-1]), None)
            if matcher is not None:
                matcher.consume_token(answer[-1])
        if matcher is None:
            matcher = LLMatcher(self._tokenizer(stops), grammar)
            matcher.consume_tokens(list(answer))
        if matcher.is_error():
            raise _refusal(matcher)
        self._matchers[key] = matcher
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

    def _tokenizer(self, stops: tuple[int, ...]) -> LLTokenizer:
        tokenizer = self._tokenizers.pop(stops, None)
        if tokenizer is None:
            path, size = str(self._tokenizer_path), self._vocab_size
            tokenizer = LLTokenizer(path, n_vocab=size, eos_token=list(stops))
        self._tokenizers[stops] = tokenizer
        if len(self._tokenizers) > MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)
        return tokenizer


def _refusal(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest("constraint", "not usable", " ".join(matcher.get_error().split()))
