"""A step as a flat int64 tensor, and back: how the first rank tells the others what to compute.

Per sequence: number of tokens, start, number of blocks, of how many tokens logits are needed; then
its tokens, then its blocks. What for is not told: only the first rank samples.
"""

from collections.abc import Sequence
from itertools import chain

import torch

from core.request import SamplingParams
from engine.batch import SequenceStep

_HEADER_WORDS = 4


def encode_steps(steps: Sequence[SequenceStep]) -> torch.Tensor:
    """The steps as int64 words."""
    return torch.tensor(list(chain.from_iterable(map(_words_of, steps))), dtype=torch.int64)


def decode_steps(words: torch.Tensor) -> list[SequenceStep]:
    """The steps that `encode_steps` wrote, the sampled ones greedy, all targets 0."""
    values, at = words.tolist(), 0
    steps = []
    while at < len(values):
        num_tokens, start, num_blocks, num_logits = values[at : at + _HEADER_WORDS]
        first_block = at + _HEADER_WORDS + num_tokens
        steps.append(
            SequenceStep(
                token_ids=values[at + _HEADER_WORDS : first_block],
                start=start,
                block_table=values[first_block : first_block + num_blocks],
                sampling=SamplingParams() if num_logits else None,
                targets=[0] * (num_logits - 1),
            )
        )
        at = first_block + num_blocks
    return steps


def _words_of(step: SequenceStep) -> list[int]:
    header = [len(step.token_ids), step.start, len(step.block_table), step.num_logits]
    return [*header, *step.token_ids, *step.block_table]
