"""The engine against independent implementations: transformers, and stored SmolLM2 outputs."""

import json
import random
from pathlib import Path

import pytest
import torch

from core.layout import Dtype
from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.block_pool import BlockPool
from engine.runner import Runner
from tests.engine_loop import generate
from tests.tiny_model import write_tiny_model

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_greedy_float32.jsonl"
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}


def make_runner(directory, *, kv_cache_bytes=8 << 20, block_size=8):
    return Runner(
        directory,
        dtype=Dtype.FLOAT32,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        num_threads=1,
    )


def generate_reference(directory, prompts, max_tokens):
    """Greedy continuations by transformers, one prompt at a time, eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(max_tokens):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
            outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3_SCALING}),
        ("llama", {"rope_parameters": LINEAR_SCALING}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
        ("mistral", {"num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 12}),  # no compiled attention kernel for this head size
    ],
)
def test_every_variant_says_what_transformers_says(tmp_path, model_type, overrides):
    write_tiny_model(tmp_path, model_type=model_type, overrides=overrides, seed=4)
    rng = random.Random(5)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (1, 9, 70, 130)]
    expected = generate_reference(tmp_path, prompts, 8)
    assert generate(make_runner(tmp_path), prompts, max_tokens=8, chunk_tokens=33) == expected


def test_a_prompt_is_told_the_log_probabilities_of_a_plain_forward_pass_in_chunks_and_beside_others(
    tmp_path,
):
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path, seed=4)
    rng = random.Random(6)
    prompt, other = ([rng.randrange(512) for _ in range(n)] for n in (41, 9))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    runner = make_runner(tmp_path)
    sampling = SamplingParams(num_logprobs=0)
    told, sampled = [], []
    for start, end in ((0, 16), (16, 17), (17, 40), (40, 41)):
        scored = SequenceStep(
            prompt[start:end],
            start,
            range(6),
            sampling if end == len(prompt) else None,
            targets=prompt[start + 1 : end + 1],
            num_top=3,
        )
        # Beside it a whole prompt and a chunk of one, whose rows must not be taken for its own.
        whole = SequenceStep(other, 0, [8, 9], sampling)
        chunk = SequenceStep(other[:5], 0, [10], None)
        result = runner.step([chunk, scored, whole])
        told += result.prompt_logprobs.get(1, ())
        assert result.prompt_logprobs.keys() <= {1}
        assert result.token_ids[0] is None
        sampled.append(result.token_ids[2])
    assert len(told) == len(prompt) - 1
    for place, logprobs in enumerate(told):
        row = expected[place]
        assert logprobs.chosen == pytest.approx(row[prompt[place + 1]].item(), abs=1e-4)
        top = row.topk(3)
        assert [value for _, value in logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [token_id for token_id, _ in logprobs.top] == top.indices.tolist()
    assert result.token_ids[1] == int(expected[-1].argmax())
    assert set(sampled) == {runner.step([SequenceStep(other, 0, [8, 9], sampling)]).token_ids[0]}


def reference_rows(wanted):
    rows = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    return [row for row in rows if wanted(row)]


@pytest.fixture(scope="module")
def smollm2(smollm2_directory):
    runner = make_runner(smollm2_directory, kv_cache_bytes=1 << 30, block_size=16)
    runner.warm_up()
    return runner


def assert_reference(runner, rows, **how):
    outputs = generate(
        runner,
        [row["prompt_token_ids"] for row in rows],
        max_tokens=[len(row["output_token_ids"]) for row in rows],
        **how,
    )
    wrong = [
        row["id"]
        for row, output in zip(rows, outputs, strict=True)
        if output != row["output_token_ids"]
    ]
    assert wrong == []


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_says_what_the_reference_says_all_rows_at_once_in_chunks(smollm2, is_thorough):
    rows = reference_rows(lambda row: is_thorough or len(row["prompt_token_ids"]) < 1000)
    assert_reference(smollm2, rows, chunk_tokens=200)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_says_what_the_reference_says_whole_prompts_one_at_a_time(smollm2, is_thorough):
    more = ("code", "ar", "prefix") if is_thorough else ()
    for row in reference_rows(lambda row: row["kind"] in ("edge", "ja", *more)):
        assert_reference(smollm2, [row])


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_says_the_same_after_prefix_hits(smollm2):
    pool = BlockPool(smollm2.num_blocks, smollm2.layout.block_size)
    rows = reference_rows(lambda row: row["kind"] == "prefix")
    for row in rows + rows[:1]:
        assert_reference(smollm2, [row], pool=pool)
    assert all(len(pool.match_prefix(row["prompt_token_ids"])) == 18 for row in rows)
