"""The runner on a tiny model: however the work is cut and mixed, the tokens are the same."""

import random
import threading

import pytest
import torch

from core.errors import ConfigError, InvariantBroken, ModelError
from core.layout import Dtype
from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.block_pool import BlockPool
from engine.runner import Runner
from tests.engine_loop import generate
from tests.tiny_model import write_tiny_model

GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=17)
KV_CACHE_BYTES = 4 << 20


def make_runner(directory, **changes):
    settings = {
        "dtype": Dtype.FLOAT32,
        "block_size": 4,
        "kv_cache_bytes": KV_CACHE_BYTES,
        "num_threads": 1,
    }
    return Runner(directory, **(settings | changes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(directory):
    return make_runner(directory)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 5, 17, 40, 64, 99)]


@pytest.fixture(scope="module")
def expected(runner, prompts):
    return [generate(runner, [p], max_tokens=12)[0] for p in prompts]


@pytest.mark.case("B-031")
@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 1000])
def test_chunks_and_mixed_batches_give_the_tokens_of_a_lone_request(
    runner, prompts, expected, chunk_tokens
):
    assert generate(runner, prompts, max_tokens=12, chunk_tokens=chunk_tokens) == expected


def test_seeded_draws_do_not_depend_on_chunks_or_neighbours(runner, prompts):
    alone = [generate(runner, [p], max_tokens=12, sampling=SEEDED)[0] for p in prompts]
    together = generate(runner, prompts, max_tokens=12, sampling=SEEDED, chunk_tokens=7)
    assert together == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=18)
    assert generate(runner, prompts, max_tokens=12, sampling=other) != alone


def test_a_resumed_request_goes_on_as_it_would_have(runner, prompts):
    prompt = prompts[3]
    whole = generate(runner, [prompt], max_tokens=12, sampling=SEEDED)[0]
    rest = generate(runner, [prompt + whole[:5]], max_tokens=7, sampling=SEEDED)[0]
    assert whole[:5] + rest == whole


def test_prefix_hits_give_the_same_tokens(runner, prompts, expected):
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    assert generate(runner, prompts, max_tokens=12, pool=pool) == expected
    assert len(pool.match_prefix(prompts[-1])) == 24
    assert generate(runner, prompts, max_tokens=12, pool=pool) == expected


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_the_block_size_does_not_change_the_tokens(directory, prompts, expected, block_size):
    other = make_runner(directory, block_size=block_size)
    assert generate(other, prompts, max_tokens=12, chunk_tokens=9) == expected


def test_a_chunk_that_is_not_the_last_gives_no_token(runner):
    result = runner.step(
        [SequenceStep([1, 2], 0, [0], None), SequenceStep([1, 2, 3], 0, [1], GREEDY)]
    )
    assert result.token_ids[0] is None
    assert isinstance(result.token_ids[1], int)
    assert result.compute_s > 0
    assert runner.step([SequenceStep([1, 2], 0, [0], None)]).token_ids == [None]


def test_the_layer_hook_sees_each_layer_once_its_kv_is_written(runner):
    runner.cache.kv_L2NSKD.zero_()
    seen = []

    def on_layer(index):
        written = runner.cache.kv_L2NSKD[:, :, 5].flatten(1).any(dim=1).tolist()
        seen.append((index, written))

    runner.step([SequenceStep([1, 2, 3], 0, [5], GREEDY)], on_layer)
    assert seen == [(i, [layer <= i for layer in range(4)]) for i in range(4)]


def test_only_the_slots_of_the_batch_are_written(runner):
    runner.cache.kv_L2NSKD.zero_()
    runner.step([SequenceStep([1, 2, 3], 3, [7, 2], None)])
    written = runner.cache.kv_L2NSKD.ne(0).any(-1).any(-1).any(0).any(0)
    assert written.nonzero().tolist() == [[2, 0], [2, 1], [7, 3]]


def test_bfloat16_stays_near_float32(directory, runner, prompts):
    narrow = make_runner(directory, dtype=Dtype.BFLOAT16)
    assert narrow.num_blocks == 2 * runner.num_blocks
    wide_first = generate(runner, prompts, max_tokens=1)
    narrow_first = generate(narrow, prompts, max_tokens=1)
    assert sum(a == b for a, b in zip(wide_first, narrow_first, strict=True)) >= len(prompts) - 1
    assert generate(narrow, prompts, max_tokens=12) == generate(narrow, prompts, max_tokens=12)


def test_the_cache_lies_in_the_memory_that_was_lent(directory):
    lent = []

    def allocate(num_bytes):
        lent.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return lent[0]

    runner = make_runner(directory, allocate=allocate)
    runner.step([SequenceStep([1, 2, 3], 0, [0], GREEDY)])
    assert lent[0].any()
    assert lent[0].numel() == runner.num_blocks * runner.layout.block_bytes <= KV_CACHE_BYTES


def test_two_runners_of_one_model_agree_on_the_layout_and_different_ones_do_not(tmp_path):
    first = make_runner(write_tiny_model(tmp_path / "a", seed=1)).layout
    same = make_runner(write_tiny_model(tmp_path / "b", seed=1)).layout
    other = make_runner(write_tiny_model(tmp_path / "c", seed=2)).layout
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_a_warm_runner_runs_in_another_thread_too(directory, runner, prompts, expected):
    fresh = make_runner(directory)
    fresh.warm_up()
    outputs = []
    thread = threading.Thread(
        target=lambda: outputs.append(generate(fresh, prompts, max_tokens=12, chunk_tokens=11))
    )
    thread.start()
    thread.join(timeout=60)
    assert outputs == [expected]


def test_a_cache_of_one_block_can_be_warmed_up(directory):
    runner = make_runner(directory, kv_cache_bytes=16 << 10, block_size=16)
    assert runner.num_blocks == 1
    runner.warm_up()


def test_too_little_memory_for_one_block_is_refused_with_the_numbers(directory):
    with pytest.raises(ConfigError, match="kv_cache_bytes: 1000 bytes hold no block.*4096 bytes"):
        make_runner(directory, kv_cache_bytes=1000)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        SequenceStep([1], 64, list(range(17)), GREEDY),
        SequenceStep([], 0, [0], GREEDY),
        SequenceStep([1, 2, 3, 4, 5], 0, [0], GREEDY),
        SequenceStep([1], 0, [1 << 20], GREEDY),
        SequenceStep([1], 0, [-1], GREEDY),
    ],
)
def test_a_step_outside_the_cache_or_the_context_is_found_before_it_runs(directory, step):
    runner = make_runner(directory, max_context_tokens=64)
    with pytest.raises(InvariantBroken):
        runner.step([step])
