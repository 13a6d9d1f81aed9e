"""A step as a flat int64 tensor, and back: how the first rank tells the others what to compute.

Per sequence: number of tokens, start, number of blocks, whether a token is sampled; then its
tokens, then its blocks. How it is sampled is not told: only the first rank samples.
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
    """The steps that `encode_steps` wrote, the sampled ones greedy."""
    values, at = words.tolist(), 0
    steps = []
    while at < len(values):
        num_tokens, start, num_blocks, is_sampled = values[at : at + _HEADER_WORDS]
        first_block = at + _HEADER_WORDS + num_tokens
        steps.append(
            SequenceStep(
                token_ids=values[at + _HEADER_WORDS : first_block],
                start=start,
                block_table=values[first_block : first_block + num_blocks],
                sampling=SamplingParams() if is_sampled else None,
            )
        )
        at = first_block + num_blocks
    return steps


def _words_of(step: SequenceStep) -> list[int]:
    is_sampled = int(step.sampling is not None)
    header = [len(step.token_ids), step.start, len(step.block_table), is_sampled]
    return [*header, *step.token_ids, *step.block_table]
