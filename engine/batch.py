"""One forward pass as values: which tokens of which sequences, and where their KV lies.

Pure bookkeeping: builds the flat tensors that the model reads from a list of `SequenceStep`s.
Knows nothing of requests or of who owns the blocks. Sequences may be mixed freely: whole prompts,
chunks over a history in the cache, and single tokens (decode). Letters: B sequences in the batch,
T tokens in the flattened batch, P block-table width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a forward pass: its tokens [start, start + len(token_ids)).

    The KV of [0, start) already lies in the blocks of `block_table`, which also has room for the
    new tokens. sampling None means that no token is sampled: a chunk that is not the last.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None

    @property
    def end(self) -> int:
        """Length of the sequence after this step."""
        return self.start + len(self.token_ids)


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
    context_lens_B: int32, length after this step. block_tables_BP: int32, padded with 0, which is
    never read. sampled_rows: rows of T whose logits are wanted. decode_rows: rows of sequences
    with one new token, and the matching decode_sequences of B; `spans` are all others.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_starts_B1: torch.Tensor
    context_lens_B: torch.Tensor
    block_tables_BP: torch.Tensor
    sampled_rows: torch.Tensor
    decode_rows: torch.Tensor
    decode_sequences: torch.Tensor
    spans: tuple[Span, ...]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids_T.numel()

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.context_lens_B.numel()


def build_batch(
    steps: Sequence[SequenceStep], *, block_size: int, device: torch.device | str = "cpu"
) -> Batch:
    """Flatten `steps`, of which there is at least one and none is empty."""
    lens = np.array([len(step.token_ids) for step in steps], dtype=np.int64)
    starts = np.array([step.start for step in steps], dtype=np.int64)
    for step in steps:
        assert step.token_ids, "a step without tokens"
        assert len(step.block_table) * block_size >= step.end, "a block table that is too short"
    query_starts = np.concatenate([[0], np.cumsum(lens)])
    sequence_T = np.repeat(np.arange(len(steps)), lens)
    positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[sequence_T]
    tables = _padded_tables(steps, block_size=block_size)
    slots = tables[sequence_T, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    is_decode = lens == 1
    is_sampled = np.array([step.sampling is not None for step in steps])

    def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    block_tables = tensor(tables, torch.int32)
    return Batch(
        token_ids_T=tensor(np.concatenate([s.token_ids for s in steps]), torch.int64),
        positions_T=tensor(positions, torch.int64),
        slot_mapping_T=tensor(slots, torch.int64),
        query_starts_B1=tensor(query_starts, torch.int32),
        context_lens_B=tensor(starts + lens, torch.int32),
        block_tables_BP=block_tables,
        sampled_rows=tensor(query_starts[1:][is_sampled] - 1, torch.int64),
        decode_rows=tensor(query_starts[:-1][is_decode], torch.int64),
        decode_sequences=tensor(np.flatnonzero(is_decode), torch.int64),
        spans=tuple(
            Span(int(query_starts[b]), int(lens[b]), int(starts[b]), block_tables[b])
            for b in np.flatnonzero(~is_decode)
        ),
        block_size=block_size,
    )


def _padded_tables(steps: Sequence[SequenceStep], *, block_size: int) -> np.ndarray:
    widths = [-(-step.end // block_size) for step in steps]
    tables = np.zeros((len(steps), max(widths)), dtype=np.int32)
    for row, step, width in zip(tables, steps, widths, strict=True):
        row[:width] = step.block_table[:width]
    return tables
