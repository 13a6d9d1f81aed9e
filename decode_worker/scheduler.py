"""What the next step of a decode worker computes.

One rule per mode:

- disaggregated: one token for each running sequence; prompts come in through handoffs. One that
  a router wants read here all the same is read as in chunked.
- chunked: one token for each running sequence first, then prompt chunks from what is left of the
  token budget, oldest prompt first (Sarathi-Serve, OSDI'24, s.4.2).
- colocated: whole prompts first, as many as the token budget takes but at least one, in a step of
  their own; running sequences wait meanwhile (the prefill-first iteration of Orca, OSDI'22).

Pure: knows no clock, no blocks and no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.config import Mode
from core.request import RequestId
from engine.batch import MAX_TARGETS


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is read at this worker and has tokens left; is_scored: each needs logits."""

    request_id: RequestId
    num_remaining_tokens: int
    is_scored: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence computes in the next step; one token for a running sequence."""

    request_id: RequestId
    num_tokens: int


class Scheduler:
    """Composes steps under a token budget and a number of decode slots."""

    def __init__(self, mode: Mode, *, max_batch_tokens: int, max_num_sequences: int) -> None:
        self._mode = mode
        self._max_batch_tokens = max_batch_tokens
        self._max_num_sequences = max_num_sequences

    def schedule(
        self, running: Sequence[RequestId], prompts: Sequence[Prompt]
    ) -> tuple[Share, ...]:
        """Shares of the next step; both lists come oldest first.

        Returns:
            Empty only when both lists are.
        """
        prompts = _within_targets(prompts)
        decodes = tuple(Share(request_id, 1) for request_id in running[: self._max_num_sequences])
        if self._mode is Mode.COLOCATED and prompts:
            return self._whole(prompts)
        return decodes + self._chunks(prompts, len(decodes))

    def _whole(self, prompts: Sequence[Prompt]) -> tuple[Share, ...]:
        shares: list[Share] = []
        budget = self._max_batch_tokens
        for prompt in prompts:
            if shares and prompt.num_remaining_tokens > budget:
                break
            shares.append(Share(prompt.request_id, prompt.num_remaining_tokens))
            budget -= prompt.num_remaining_tokens
        return tuple(shares)

    def _chunks(self, prompts: Sequence[Prompt], num_decodes: int) -> tuple[Share, ...]:
        shares: list[Share] = []
        # A budget below the number of slots must not stop prompts from being read at all.
        budget = max(self._max_batch_tokens - num_decodes, 1)
        for prompt in prompts:
            if budget == 0:
                break
            num_tokens = min(prompt.num_remaining_tokens, budget)
            shares.append(Share(prompt.request_id, num_tokens))
            budget -= num_tokens
        return tuple(shares)


def _within_targets(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Of those that need logits of each token only the oldest, and a bounded part of it."""
    scored = [prompt for prompt in prompts if prompt.is_scored]
    return [
        replace(prompt, num_remaining_tokens=min(prompt.num_remaining_tokens, MAX_TARGETS))
        if prompt.is_scored
        else prompt
        for prompt in prompts
        if prompt not in scored[1:]
    ]
