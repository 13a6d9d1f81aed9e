"""Which prompts the next step reads, and how much of each.

Chunked prefill after Sarathi-Serve (OSDI'24, s.4.2), without decodes: each step takes at most
`max_batch_tokens` prompt tokens. To be fair to long and short prompts the oldest one is sure of
half of the budget, the rest goes to the prompts with the least left to read: so a short prompt
never waits for a whole long one, and a long one never waits for ever.

Pure: knows no clock, no blocks and no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.request import RequestId
from engine.batch import MAX_TARGETS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt with tokens left to read; is_scored when each of them needs logits."""

    request_id: RequestId
    num_remaining_tokens: int
    is_scored: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one prompt gets of the next step."""

    request_id: RequestId
    num_tokens: int


class Scheduler:
    """Divides the token budget of each step."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens

    def schedule(self, candidates: Sequence[Candidate]) -> tuple[Share, ...]:
        """Shares of the next step; candidates come oldest first, shares go in the same order.

        Returns:
            At most max_batch_tokens tokens in all, at least one token in each share; empty only
            when there is no candidate.
        """
        if not candidates:
            return ()
        candidates = _within_targets(candidates)
        budget = self._max_batch_tokens
        oldest = candidates[0]
        sure = min(oldest.num_remaining_tokens, -(-budget // 2))
        tokens = {oldest.request_id: sure}
        budget -= sure
        for candidate in sorted(candidates[1:], key=lambda c: c.num_remaining_tokens):
            if budget == 0:
                break
            tokens[candidate.request_id] = min(candidate.num_remaining_tokens, budget)
            budget -= tokens[candidate.request_id]
        tokens[oldest.request_id] += min(oldest.num_remaining_tokens - sure, budget)
        return tuple(
            Share(c.request_id, tokens[c.request_id]) for c in candidates if c.request_id in tokens
        )


def _within_targets(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of those that need logits of each token only the oldest, and a bounded part of it."""
    scored = [candidate for candidate in candidates if candidate.is_scored]
    return [
        replace(candidate, num_remaining_tokens=min(candidate.num_remaining_tokens, MAX_TARGETS))
        if candidate.is_scored
        else candidate
        for candidate in candidates
        if candidate not in scored[1:]
    ]
