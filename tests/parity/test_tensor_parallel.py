"""Several ranks give the tokens of one, and a lost rank ends the worker instead of hanging it."""

import contextlib
import os
import random
import signal
import subprocess

import pytest

import engine.parallel
from core.errors import ConfigError, PeerLost
from core.layout import Dtype
from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.leader import EngineSettings, running_engine
from tests.engine_loop import generate
from tests.parity.test_engine_model import (
    assert_reference,
    generate_reference,
    reference_rows,
)
from tests.tiny_model import write_tiny_model

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=17)


def settings_of(directory, size, **changes):
    settings = {
        "dtype": Dtype.FLOAT32,
        "block_size": 8,
        "kv_cache_bytes": 8 << 20,
        "num_threads": 1,
        "tensor_parallel": size,
    }
    return EngineSettings(directory, **(settings | changes))


def followers_of_this_process():
    listing = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in listing.stdout.splitlines() if "engine.rank" in line]


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(510) for _ in range(n)] for n in (1, 9, 70, 130)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=511, seed=4)


@pytest.fixture(scope="module")
def expected(directory, prompts):
    return generate_reference(directory, prompts, 8)


@pytest.fixture(scope="module")
def two_ranks(directory):
    with running_engine(settings_of(directory, 2)) as runner:
        yield runner


@pytest.mark.parametrize("chunk_tokens", [5, 33, 1000])
def test_two_ranks_say_what_transformers_says(two_ranks, prompts, expected, chunk_tokens):
    assert generate(two_ranks, prompts, max_tokens=8, chunk_tokens=chunk_tokens) == expected


def test_seeded_draws_of_two_ranks_are_those_of_one(directory, two_ranks, prompts):
    with running_engine(settings_of(directory, 1)) as runner:
        alone = generate(runner, prompts, max_tokens=12, sampling=SEEDED)
    assert generate(two_ranks, prompts, max_tokens=12, sampling=SEEDED, chunk_tokens=33) == alone


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_four_ranks_share_two_kv_heads(tmp_path, prompts, model_type):
    write_tiny_model(
        tmp_path, model_type=model_type, seed=4, overrides={"tie_word_embeddings": True}
    )
    expected = generate_reference(tmp_path, prompts, 6)
    with running_engine(settings_of(tmp_path, 4)) as runner:
        assert runner.layout.tensor_parallel_size == 4
        assert runner.cache.kv_L2NSKD.shape[4] == 1
        assert generate(runner, prompts, max_tokens=6, chunk_tokens=33) == expected


def test_bfloat16_runs_on_two_ranks(directory, prompts):
    with running_engine(settings_of(directory, 1, dtype=Dtype.BFLOAT16)) as runner:
        alone = generate(runner, prompts, max_tokens=1)
    with running_engine(settings_of(directory, 2, dtype=Dtype.BFLOAT16)) as runner:
        assert sum(map(list.__eq__, generate(runner, prompts, max_tokens=1), alone)) >= 3


def test_rank_0_sees_the_caches_of_all_ranks_side_by_side(directory, two_ranks):
    prompt = [7, 8, 9]
    with running_engine(settings_of(directory, 1)) as runner:
        runner.cache.kv_L2NSKD.zero_()
        runner.step([SequenceStep(prompt, 0, [5], None)])
        whole_L2SKD = runner.cache.kv_L2NSKD[:, :, 5, :3].clone()
    two_ranks.step([SequenceStep(prompt, 0, [5], None)])
    shape = two_ranks.cache.kv_L2NSKD.shape
    shards_RL2NSKD = two_ranks.storage.view(two_ranks.cache.kv_L2NSKD.dtype).view(2, *shape)
    for rank in range(2):
        mine, its = whole_L2SKD[..., rank : rank + 1, :], shards_RL2NSKD[rank][:, :, 5, :3]
        assert (mine - its).abs().max() < 1e-4
        assert its.any()


def test_the_layer_hook_comes_when_all_ranks_have_written(directory, two_ranks):
    shape = two_ranks.cache.kv_L2NSKD.shape
    shards_RL2NSKD = two_ranks.storage.view(two_ranks.cache.kv_L2NSKD.dtype).view(2, *shape)
    shards_RL2NSKD.zero_()
    seen = []

    def on_layer(index):
        seen.append((index, shards_RL2NSKD[:, index, :, 5, :3].flatten(2).any(dim=2).all().item()))

    # no token is sampled: the last sum is over no rows, and still waits for every rank
    two_ranks.step([SequenceStep([1, 2, 3], 0, [5], None)], on_layer)
    assert seen == [(index, True) for index in range(4)]


def test_two_ranks_tell_the_log_probabilities_of_one(directory, two_ranks, prompts):
    prompt = prompts[2]
    step = SequenceStep(prompt, 0, range(9), SamplingParams(), targets=prompt[1:], num_top=2)
    [told] = two_ranks.step([step]).prompt_logprobs.values()
    with running_engine(settings_of(directory, 1)) as runner:
        [alone] = runner.step([step]).prompt_logprobs.values()
    assert [each.chosen for each in told] == pytest.approx([a.chosen for a in alone], abs=1e-4)
    assert len(told) == len(prompt) - 1


def test_a_long_step_is_announced_whole(two_ranks, expected, prompts):
    long_prompt = [3 + i % 400 for i in range(2000)]
    assert len(generate(two_ranks, [long_prompt], max_tokens=2)[0]) == 2
    assert generate(two_ranks, prompts[:1], max_tokens=8) == expected[:1]


def test_no_process_is_left(directory):
    before = followers_of_this_process()
    with running_engine(settings_of(directory, 2)):
        assert len(followers_of_this_process()) == len(before) + 1
    assert followers_of_this_process() == before


@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGKILL, "its connection ended"), (signal.SIGSTOP, "it fell silent")],
)
def test_a_lost_rank_ends_the_next_step_with_a_clear_error(directory, monkeypatch, number, why):
    monkeypatch.setattr(engine.parallel, "COLLECTIVE_TIMEOUT_S", 2.0)
    before = followers_of_this_process()
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(running_engine(settings_of(directory, 2)))
        (follower,) = set(followers_of_this_process()) - set(before)
        os.kill(follower, number)
        with pytest.raises(PeerLost, match=f"a rank of this worker was lost: {why}"):
            for _ in range(3):
                runner.step([SequenceStep([1, 2, 3], 0, [0], SamplingParams())])
        if number == signal.SIGSTOP:
            os.kill(follower, signal.SIGKILL)
    assert followers_of_this_process() == before


@pytest.mark.model
@pytest.mark.timeout(600)
def test_three_ranks_say_what_the_reference_says(smollm2_directory, is_thorough):
    settings = settings_of(smollm2_directory, 3, kv_cache_bytes=256 << 20, block_size=16)
    with running_engine(settings) as runner:
        kinds = ("edge", "ja", "code", "prefix") if is_thorough else ("edge", "ja")
        rows = reference_rows(lambda row: row["kind"] in kinds)
        assert_reference(runner, rows, chunk_tokens=200)


def test_heads_that_cannot_be_divided_are_refused(tmp_path):
    write_tiny_model(
        tmp_path, overrides={"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
    )
    with (
        pytest.raises(ConfigError, match="9 query heads and 3 key/value heads .* 2 ranks"),
        running_engine(settings_of(tmp_path, 2)),
    ):
        pass
