"""One forward pass as values: which tokens of which sequences, and where their KV lies.

Pure bookkeeping: builds the flat tensors that the model reads from a list of `SequenceStep`s.
Knows nothing of requests or of who owns the blocks. Sequences may be mixed freely: whole prompts,
chunks over a history in the cache, and single tokens (decode). Letters: B sequences in the batch,
T tokens in the flattened batch, P block-table width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # numpy arrays of any format

import numpy as np
import torch

from core.errors import TwophaseError
from core.request import Logprobs, SamplingParams
from engine.sampling.logits import History

Array = np.ndarray[Any, Any]
Upload = Callable[[Sequence[Array]], list[torch.Tensor]]

# Tokens of one step that may have targets: each takes a row of logits as long as the vocabulary.
MAX_TARGETS = 256


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a forward pass: its tokens [start, start + len(token_ids)).

    The KV of [0, start) already lies in the blocks of `block_table`, which also has room for the
    new tokens. sampling None means that no token is sampled: a chunk that is not the last.
    history is there whenever sampling.needs_history. targets: which tokens follow the first
    len(targets) of this step, when their log-probabilities are wanted, with num_top alternatives.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    history: History | None = None
    targets: Sequence[int] = ()
    num_top: int = 0

    @property
    def num_logits(self) -> int:
        """Of its last tokens, how many need logits: all of a step that has targets."""
        return len(self.token_ids) if self.targets else int(self.sampling is not None)

    @property
    def end(self) -> int:
        """Length of the sequence after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per step: the sampled token id, None where no token was asked for.

    logprobs: by index of the step, where they were asked for. failures: by index, requests whose
    token could not be chosen; the others are not touched by that. prompt_logprobs: by index, one
    for each of the step's targets.
    """

    token_ids: list[int | None]
    compute_s: float
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    failures: Mapping[int, TwophaseError] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence with two or more new tokens: rows [first_row, first_row + num_rows) of T."""

    first_row: int
    num_rows: int
    start: int
    block_table: torch.Tensor

    @property
    def end(self) -> int:
        """Length of the sequence after this step."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """The flattened tensors of one forward pass, in the order of the steps.

    token_ids_T, positions_T: int64. slot_mapping_T: int64, block * block_size + place of each new
    token. query_starts_B1: int32, rows of sequence b are [query_starts[b], query_starts[b + 1]).
    context_lens_B: int32, length after this step; key_starts_B1: int32, their sums from 0 on.
    block_tables_BP: int32, padded with 0, which is never read. sampled_rows: rows of T whose logits
    are wanted. decode_rows: rows of sequences with one new token, and the matching
    decode_sequences of B; `spans` are all others. max_query_tokens and max_context_tokens: the most
    rows and the greatest length of a sequence, known without asking the device.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_starts_B1: torch.Tensor
    context_lens_B: torch.Tensor
    key_starts_B1: torch.Tensor
    block_tables_BP: torch.Tensor
    sampled_rows: torch.Tensor
    decode_rows: torch.Tensor
    decode_sequences: torch.Tensor
    spans: tuple[Span, ...]
    block_size: int
    max_query_tokens: int
    max_context_tokens: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids_T.numel()

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.context_lens_B.numel()

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, so that row b is sequence b's."""
        return not self.spans


def upload_to_host(arrays: Sequence[Array]) -> list[torch.Tensor]:
    """The same memory as CPU tensors."""
    return [torch.from_numpy(array) for array in arrays]


def build_batch(
    steps: Sequence[SequenceStep],
    *,
    block_size: int,
    upload: Upload = upload_to_host,
    table_width: int = 0,
) -> Batch:
    """Flatten `steps`, of which there is at least one and none is empty.

    upload(arrays) puts all of them on the device at once. Block tables are as wide as the longest
    sequence needs, at least table_width.
    """
    lens = np.array([len(step.token_ids) for step in steps], dtype=np.int64)
    starts = np.array([step.start for step in steps], dtype=np.int64)
    query_starts = _sums(lens)
    tables = _padded_tables(steps, block_size=block_size, least_width=table_width)
    is_decode = lens == 1
    num_after_T = np.repeat(query_starts[1:], lens) - np.arange(query_starts[-1])
    arrays = {
        **_tokens(steps, lens, starts, tables, block_size),
        "query_starts_B1": query_starts.astype(np.int32),
        "context_lens_B": (starts + lens).astype(np.int32),
        "key_starts_B1": _sums(starts + lens).astype(np.int32),
        "block_tables_BP": tables,
        "sampled_rows": np.flatnonzero(
            num_after_T <= np.repeat([s.num_logits for s in steps], lens)
        ),
        "decode_rows": query_starts[:-1][is_decode],
        "decode_sequences": np.flatnonzero(is_decode),
    }
    tensors = dict(zip(arrays, upload(list(arrays.values())), strict=True))
    spans = tuple(
        Span(int(query_starts[b]), int(lens[b]), int(starts[b]), tensors["block_tables_BP"][b])
        for b in np.flatnonzero(~is_decode)
    )
    return Batch(
        **tensors,
        spans=spans,
        block_size=block_size,
        max_query_tokens=int(lens.max()),
        max_context_tokens=int((starts + lens).max()),
    )


def _tokens(
    steps: Sequence[SequenceStep], lens: Array, starts: Array, tables: Array, block_size: int
) -> dict[str, Array]:
    """What each row has, int64."""
    for step in steps:
        assert step.token_ids, "a step without tokens"
    sequence_T = np.repeat(np.arange(len(steps)), lens)
    positions = np.arange(int(lens.sum())) - (_sums(lens)[:-1] - starts)[sequence_T]
    slots = tables[sequence_T, positions // block_size].astype(np.int64) * block_size
    token_ids = np.concatenate([np.asarray(step.token_ids, np.int64) for step in steps])
    return {
        "token_ids_T": token_ids,
        "positions_T": positions,
        "slot_mapping_T": slots + positions % block_size,
    }


def _sums(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)])


def _padded_tables(steps: Sequence[SequenceStep], *, block_size: int, least_width: int) -> Array:
    widths = [-(-step.end // block_size) for step in steps]
    for step, width in zip(steps, widths, strict=True):
        assert len(step.block_table) >= width, "a block table that is too short"
    tables = np.zeros((len(steps), max([least_width, *widths])), dtype=np.int32)
    for row, step, width in zip(tables, steps, widths, strict=True):
        row[:width] = step.block_table[:width]
    return tables
