"""Decode steps as graphs, at a ladder of sizes: which one a step takes, and how it is filled up.

A decode step of a card is hundreds of small kernels, whose launches take longer than they do. A
graph launches them as one, for a fixed number of sequences and a fixed width of the block table (a
*rung*). A step runs in the smallest rung that holds it, with dummy sequences in the free places:
each is one token at position 0 of a scratch block that no request ever gets, so that it reads and
writes nothing of anybody. Any other step, and all steps where no rung fits or none could be
captured, run in the runner's plain loop, which gives the same tokens.

Choosing and filling up are pure. Knows no CUDA: the device captures.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.request import SamplingParams
from engine.attention import Attention
from engine.batch import Array, Batch, SequenceStep, build_batch
from engine.device import Device, Graph, GraphMaker
from engine.device.packing import places_of

SMALL_RUNGS = (1, 2, 4, 8)
STEP_BELOW_64, STEP_ABOVE = 8, 32

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Rung:
    """The size of one graph."""

    num_sequences: int
    table_width: int


def batch_sizes(max_num_sequences: int) -> tuple[int, ...]:
    """Numbers of sequences, rising: at most every eighth row, later a third, is a dummy's."""
    middle = range(2 * STEP_BELOW_64, 64, STEP_BELOW_64)
    sizes = [*SMALL_RUNGS, *middle, *range(64, max_num_sequences, STEP_ABOVE)]
    return (*(size for size in sizes if size < max_num_sequences), max_num_sequences)


def rungs_of(attention: Attention, max_num_sequences: int, max_width: int) -> tuple[Rung, ...]:
    """Every rung that `attention` can capture, rising."""
    return tuple(
        Rung(size, width)
        for size in batch_sizes(max_num_sequences)
        for width in attention.graph_widths(size, max_width)
    )


def rung_for(
    steps: Sequence[SequenceStep], rungs: Sequence[Rung], *, block_size: int
) -> Rung | None:
    """The smallest rung that holds the steps; None if one is no decode step, or none holds them."""
    if any(len(step.token_ids) != 1 or step.sampling is None for step in steps):
        return None
    width = max(-(-step.end // block_size) for step in steps)
    for rung in rungs[bisect_left(rungs, Rung(len(steps), 0)) :]:
        if rung.table_width >= width:
            return rung
    return None


def filled_up(
    steps: Sequence[SequenceStep], num_sequences: int, *, scratch_block: int
) -> list[SequenceStep]:
    """The steps, then dummies that make them num_sequences."""
    dummy = SequenceStep([0], 0, [scratch_block], SamplingParams())
    return [*steps, *[dummy] * (num_sequences - len(steps))]


class DecodeGraphs:
    """The captured rungs of one model; not thread-safe.

    `reason` says in words what decode steps run as. Invariant: each graph reads its step from
    memory of its own, which is overwritten before every launch.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        device: Device,
        *,
        block_size: int,
        scratch_block: int,
    ) -> None:
        """forward(batch) gives logits of all sampled rows; scratch_block is no request's."""
        self.reason = "decode step by step: no graph was captured"
        self._forward = forward
        self._device = device
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._rungs: tuple[Rung, ...] = ()
        self._captured: dict[Rung, _Captured] = {}

    def capture(self, rungs: Sequence[Rung], maker: GraphMaker) -> None:
        """Capture all, the largest first: the others then fit into its scratch memory.

        A failure is no error: steps run in the plain loop, and `reason` says why.
        """
        try:
            for rung in sorted(rungs, reverse=True):
                self._captured[rung] = self._capture(rung, maker)
        except RuntimeError as error:
            first = str(error).split("\n", maxsplit=1)[0]
            self._captured.clear()
            self.reason = f"decode step by step: a graph could not be captured ({first})"
            LOG.warning("%s", self.reason)
            return
        self._rungs = tuple(sorted(rungs))
        if rungs:
            most = self._rungs[-1].num_sequences
            self.reason = f"decode in {len(rungs)} graphs of up to {most} sequences"

    def logits(self, steps: Sequence[SequenceStep]) -> torch.Tensor | None:
        """Logits of the steps, in order, until the next call; None if no rung holds them."""
        rung = rung_for(steps, self._rungs, block_size=self._block_size)
        if rung is None:
            return None
        captured = self._captured[rung]
        self._batch(steps, rung, captured.memory)
        return captured.graph()[: len(steps)]

    def _capture(self, rung: Rung, maker: GraphMaker) -> "_Captured":
        memory: list[torch.Tensor] = []

        def upload(arrays: Sequence[Array]) -> list[torch.Tensor]:
            size, device = places_of(arrays)[1], self._device.torch_device
            memory.append(torch.empty(size, dtype=torch.uint8, device=device))
            return self._device.upload(arrays, memory[0])

        dummies = filled_up([], rung.num_sequences, scratch_block=self._scratch_block)
        batch = build_batch(
            dummies, block_size=self._block_size, upload=upload, table_width=rung.table_width
        )
        return _Captured(maker.capture(lambda: self._forward(batch)), memory[0])

    def _batch(self, steps: Sequence[SequenceStep], rung: Rung, memory: torch.Tensor) -> None:
        """Write the steps over those that the rung's graph was captured with."""
        build_batch(
            filled_up(steps, rung.num_sequences, scratch_block=self._scratch_block),
            block_size=self._block_size,
            upload=lambda arrays: self._device.upload(arrays, memory),
            table_width=rung.table_width,
        )


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    memory: torch.Tensor
