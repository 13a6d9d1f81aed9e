"""Which graph a decode step takes, what fills it up, and what happens when none can be made."""

import random

import pytest

from core.request import SamplingParams
from engine.attention.flash2 import Flash2Attention
from engine.attention.sdpa import SdpaAttention
from engine.batch import SequenceStep
from engine.decode_graph import (
    DecodeGraphs,
    Rung,
    batch_sizes,
    filled_up,
    rung_for,
    rungs_of,
)
from engine.device.double import CardDouble, PlainGraphs

GREEDY = SamplingParams()
BLOCK_SIZE = 16


def decode_step(position, sampling=GREEDY):
    return SequenceStep([7], position, range(position // BLOCK_SIZE + 1), sampling)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 256, 1000])
def test_the_ladder_rises_to_the_largest_batch_and_wastes_little(most):
    sizes = batch_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for num in range(1, most + 1):
        smallest = next(size for size in sizes if size >= num)
        assert smallest - num <= max(num, 1)
        if num > 64:
            assert smallest - num < 32
    assert len(sizes) < 12 + most / 32


def test_a_kernel_that_reads_tables_has_one_width_and_gathering_has_several():
    flash = Flash2Attention(None, block_size=256, reason="a test")
    assert rungs_of(flash, 4, 32) == (Rung(1, 32), Rung(2, 32), Rung(4, 32))
    gathering = SdpaAttention("a test", 16)
    assert rungs_of(gathering, 2, 64) == (Rung(1, 32), Rung(1, 64), Rung(2, 32), Rung(2, 64))


def test_a_step_takes_the_smallest_rung_that_holds_it():
    rungs = (Rung(1, 2), Rung(1, 8), Rung(4, 2), Rung(4, 8), Rung(8, 2))

    def rung(*positions):
        return rung_for([decode_step(p) for p in positions], rungs, block_size=BLOCK_SIZE)

    assert rung(0) == rung(31) == Rung(1, 2)
    assert rung(32) == rung(127) == Rung(1, 8)
    assert rung(128) is None
    assert rung(0, 0) == rung(0, 31, 5, 5) == Rung(4, 2)
    assert rung(0, 32) == Rung(4, 8)
    assert rung(*[0] * 5) == Rung(8, 2)
    assert rung(*[0] * 4, 32) is None
    assert rung(*[0] * 9) is None
    assert rung_for([decode_step(0)], (), block_size=BLOCK_SIZE) is None


def test_steps_that_read_prompts_or_sample_nothing_take_none():
    rungs = (Rung(4, 8),)
    prompt = SequenceStep([1, 2], 0, [0], GREEDY)
    for other in (prompt, decode_step(5, sampling=None)):
        assert rung_for([decode_step(3), other], rungs, block_size=BLOCK_SIZE) is None


def test_free_places_are_filled_with_tokens_of_the_scratch_block():
    steps = [decode_step(3), decode_step(40)]
    filled = filled_up(steps, 5, scratch_block=99)
    assert filled[:2] == steps
    assert len(filled) == 5
    for dummy in filled[2:]:
        assert (list(dummy.token_ids), dummy.start, list(dummy.block_table)) == ([0], 0, [99])
        assert dummy.sampling is not None


def sums_of(batch):
    """In the place of a model: what identifies each row, read from the batch's tensors alone."""
    rows = batch.token_ids_T + 1000 * batch.positions_T + batch.slot_mapping_T
    return (rows + 7 * batch.block_tables_BP.sum(dim=1) + batch.context_lens_B)[:, None].float()


def graphs_of(forward, rungs):
    graphs = DecodeGraphs(forward, CardDouble(), block_size=BLOCK_SIZE, scratch_block=500)
    maker = PlainGraphs()
    graphs.capture(rungs, maker)
    return graphs, maker


def test_a_graph_sees_each_step_through_its_own_memory():
    graphs, maker = graphs_of(sums_of, [Rung(n, w) for n in (1, 2, 4) for w in (4, 30)])
    assert maker.num_captured == 6
    assert graphs.reason == "decode in 6 graphs of up to 4 sequences"
    rng = random.Random(1)
    for turn in range(60):
        steps = [
            SequenceStep([rng.randrange(999)], p, [rng.randrange(500) for _ in range(30)], GREEDY)
            for p in (rng.randrange(30 * BLOCK_SIZE) for _ in range(rng.randrange(1, 5)))
        ]
        wanted = [
            s.token_ids[0]
            + 1000 * s.start
            + s.block_table[s.start // BLOCK_SIZE] * BLOCK_SIZE
            + s.start % BLOCK_SIZE
            + 7 * sum(s.block_table[: s.start // BLOCK_SIZE + 1])
            + s.end
            for s in steps
        ]
        assert graphs.logits(steps)[:, 0].tolist() == wanted
        assert maker.num_replays == turn + 1


def test_a_step_that_no_rung_holds_is_left_to_the_plain_loop():
    graphs, maker = graphs_of(sums_of, [Rung(2, 4)])
    assert graphs.logits([decode_step(0)] * 3) is None
    assert graphs.logits([decode_step(4 * BLOCK_SIZE)]) is None
    assert maker.num_replays == 0


def test_a_model_that_cannot_be_captured_runs_step_by_step_and_says_why(caplog):
    def reads_a_value(batch):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs, _ = graphs_of(reads_a_value, [Rung(2, 4), Rung(1, 4)])
    assert graphs.logits([decode_step(0)]) is None
    assert graphs.reason == (
        "decode step by step: a graph could not be captured "
        "(operation not permitted when stream is capturing)"
    )
    assert "could not be captured" in caplog.text


def test_a_model_without_graphs_says_so():
    graphs = DecodeGraphs(sums_of, CardDouble(), block_size=BLOCK_SIZE, scratch_block=0)
    assert graphs.logits([decode_step(0)]) is None
    assert graphs.reason == "decode step by step: no graph was captured"
    graphs.capture([], PlainGraphs())
    assert graphs.logits([decode_step(0)]) is None
