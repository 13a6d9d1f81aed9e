"""The way of a card gives the tokens of the CPU's: graphs, packed uploads, flash-attn's calls.

On the card's double everywhere, and on the card itself where there is one.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from core.errors import ConfigError
from core.layout import Dtype
from core.request import SamplingParams
from engine.attention import ReferenceAttention
from engine.attention.flash_double import FlashAttn2Double, FlashAttn3Double
from engine.batch import SequenceStep
from engine.block_pool import BlockPool
from engine.device import HostDevice, open_device
from engine.device.double import CardDouble
from engine.parallel import SingleRank
from engine.runner import Runner
from tests.engine_loop import generate
from tests.tiny_model import write_tiny_model

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=17)
MAX_TOKENS = 12
CARDS = {
    "flash-attn 2": (Dtype.BFLOAT16, {"flash_attn": FlashAttn2Double()}, 256),
    "flash-attn 3": (Dtype.BFLOAT16, {"flash_attn_interface": FlashAttn3Double()}, 64),
    "sdpa": (Dtype.FLOAT32, {}, 16),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 5, 17, 40, 64, 99, 300)]


class TwinDevice(HostDevice):
    """A CPU whose attention is the plain twin.

    In bfloat16 tokens of two right kernels may differ, where a last bit decides between logits;
    the doubles of flash-attn round where the twin rounds.
    """

    def select_attention(self, needs):
        return ReferenceAttention()


@pytest.fixture(scope="module")
def expected(directory, prompts):
    """What the CPU says, by number format: in float32 as it is, in bfloat16 with the twin."""
    outputs = {}
    for dtype, device in ((Dtype.FLOAT32, HostDevice()), (Dtype.BFLOAT16, TwinDevice())):
        runner = Runner(
            directory, dtype=dtype, num_threads=1, kv_cache_bytes=4 << 20, device=device
        )
        outputs[dtype] = generate(runner, prompts, max_tokens=MAX_TOKENS)
    return outputs


def card_runner(directory, name, **changes):
    dtype, packages, _ = CARDS[name]
    settings = {
        "dtype": dtype,
        "num_threads": 1,
        "device": CardDouble(packages),
        "max_context_tokens": 1024,
        "max_decode_sequences": 8,
    }
    runner = Runner(directory, **(settings | changes))
    runner.warm_up()
    return runner


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("name", CARDS)
def test_graphs_and_the_plain_loop_give_the_tokens_of_the_cpu(
    directory, prompts, expected, name, chunk_tokens
):
    dtype, packages, block_size = CARDS[name]
    card = CardDouble(packages)
    runner = card_runner(directory, name, device=card)
    assert runner.layout.block_size == block_size
    assert runner.kernels.startswith(f"{name}: ")
    assert "graphs of up to 8 sequences" in runner.kernels
    tokens = generate(runner, prompts, max_tokens=MAX_TOKENS, chunk_tokens=chunk_tokens)
    assert tokens == expected[dtype]
    assert card.graphs.num_replays >= MAX_TOKENS - 1
    plain = card_runner(directory, name, max_decode_sequences=0)
    assert "graphs" not in plain.kernels
    tokens = generate(plain, prompts, max_tokens=MAX_TOKENS, chunk_tokens=chunk_tokens)
    assert tokens == expected[dtype]


@pytest.mark.parametrize("name", CARDS)
def test_prefix_hits_and_more_sequences_than_graphs_have(directory, prompts, expected, name):
    dtype, _, _ = CARDS[name]
    runner = card_runner(directory, name, max_decode_sequences=4)
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    for _ in range(2):
        assert generate(runner, prompts, max_tokens=MAX_TOKENS, pool=pool) == expected[dtype]
    assert len(pool.match_prefix(prompts[-1])) == 300 // runner.layout.block_size


def test_seeded_draws_are_those_of_the_cpu(directory, prompts):
    cpu = Runner(directory, dtype=Dtype.FLOAT32, num_threads=1, kv_cache_bytes=4 << 20)
    card = card_runner(directory, "sdpa")
    outputs = [generate(r, prompts, max_tokens=20, sampling=SEEDED) for r in (cpu, card)]
    assert outputs[0] == outputs[1]


def test_dummies_write_into_the_scratch_block_alone(directory):
    runner = card_runner(directory, "sdpa")
    runner.cache.kv_L2NSKD.zero_()
    assert runner.cache.num_blocks == runner.num_blocks + 1
    runner.step([SequenceStep([5], 3, [2], SamplingParams())] * 3)
    written = runner.cache.kv_L2NSKD.ne(0).any(-1).any(-1).any(0).any(0)
    assert written.nonzero().tolist() == [[2, 3], [runner.num_blocks, 0]]


def test_no_sequence_gets_the_scratch_block(directory):
    runner = card_runner(directory, "sdpa")
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    assert runner.num_blocks not in pool.reserve(runner.num_blocks).block_ids


def test_the_cache_takes_what_is_free(directory):
    runner = card_runner(directory, "sdpa", device=CardDouble(num_free_bytes=4 << 20))
    block_bytes = runner.layout.block_bytes
    assert runner.cache.num_blocks == int((4 << 20) * 0.85) // block_bytes
    with pytest.raises(ConfigError, match="kv_cache_bytes: .* free bytes"):
        card_runner(directory, "sdpa", device=CardDouble(), kv_cache_bytes=1 << 30)


def test_a_layer_is_told_when_the_card_has_written_it_and_not_when_it_is_enqueued(directory):
    kernels_are_done = threading.Event()
    waits, seen = [], []

    def await_kernels():
        waits.append(kernels_are_done.wait(10.0))

    runner = card_runner(directory, "sdpa", device=CardDouble(await_kernels=await_kernels))
    with ThreadPoolExecutor(1) as device_thread:
        step = device_thread.submit(
            runner.step, [SequenceStep([1, 2, 3], 0, [0], SamplingParams())], seen.append
        )
        # 1 every layer is enqueued, and nobody is told before the card is done with it
        with pytest.raises(TimeoutError):
            step.result(0.2)
        assert (waits, seen) == ([], [])
        # 2 everybody is told, in order, before the step is over
        kernels_are_done.set()
        step.result(10.0)
        assert (waits, seen) == ([True] * 4, [0, 1, 2, 3])


class HalfOfTwo(SingleRank):
    """Rank 0 of two, as if the other one answered with zeros."""

    size = 2

    def gather(self, shard_BV):
        return torch.cat([shard_BV, torch.zeros_like(shard_BV)], dim=-1)


def test_several_ranks_decode_step_by_step_and_the_status_says_why(directory):
    card = CardDouble()
    runner = card_runner(directory, "sdpa", device=card, parallel=HalfOfTwo())
    assert runner.kernels.endswith(
        "; decode step by step: graphs are for one rank, this worker has 2"
    )
    assert card.graphs.num_captured == 0
    assert runner.cache.num_blocks == runner.num_blocks


def test_the_largest_step_is_tried_at_the_start(directory):
    runner = card_runner(directory, "sdpa", max_context_tokens=100)
    tried = []
    step = runner.step

    def watched(steps, on_layer=None):
        tried.append(sum(len(s.token_ids) for s in steps))
        return step(steps, on_layer)

    runner.step = watched
    runner.warm_up(250)
    assert tried == [16, 1, 250]

    def full(steps, on_layer=None):
        if sum(len(s.token_ids) for s in steps) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return step(steps, on_layer)

    runner.step = full
    with pytest.raises(ConfigError, match="max_batch_tokens: a step of 250 tokens does not fit"):
        runner.warm_up(250)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("max_decode_sequences", [0, 8], ids=["plain", "graphs"])
def test_a_card_gives_the_tokens_of_the_cpu_in_float32(
    directory, prompts, expected, max_decode_sequences
):
    runner = Runner(
        directory,
        dtype=Dtype.FLOAT32,
        num_threads=1,
        kv_cache_bytes=4 << 20,
        max_context_tokens=1024,
        max_decode_sequences=max_decode_sequences,
        device=open_device("cuda:0"),
    )
    runner.warm_up()
    for chunk_tokens in (7, 1000):
        tokens = generate(runner, prompts, max_tokens=MAX_TOKENS, chunk_tokens=chunk_tokens)
        assert tokens == expected[Dtype.FLOAT32]
