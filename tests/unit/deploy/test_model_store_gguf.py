"""A GGUF file becomes a Hugging Face directory with the same weights and the same tokenizer."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.progress import Progress
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from core.errors import ModelError
from deploy.gguf_model import build_tokenizer, convert_gguf, half_split_rows, hugging_face_name

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, FFN = 4, 2, 16, 64, 96
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab"]
MERGES = ["1 2", "a b"]
SHAPES = {
    "token_embd.weight": (len(WORDS), WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (NUM_HEADS * HEAD_DIM, WIDTH),
    "blk.0.attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, WIDTH),
    "blk.0.attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, NUM_HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.ffn_gate.weight": (FFN, WIDTH),
    "blk.0.ffn_up.weight": (FFN, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, FFN),
}


def write_gguf(path: Path, *, pre: str = "smollm", architecture: str = "llama") -> dict:
    """A one-layer Llama with Q4_1 matrices at `path`; its tensors as float32, by GGUF name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(WORDS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    kind = gguf.GGMLQuantizationType.Q4_1
    generator = np.random.default_rng(0)
    expected = {}
    for name, shape in SHAPES.items():
        weight = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quantize(weight, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            weight = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(name, weight)
        expected[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def convert(gguf_path: Path, directory: Path) -> Path:
    directory.mkdir()
    convert_gguf(gguf_path, directory, progress=Progress(disable=True))
    return directory


def rotate_pairs_reference(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of one head over adjacent pairs (x0, y0, x1, y1, ...)."""
    rotated = x.copy()
    for pair in range(HEAD_DIM // 2):
        angle = position * 10_000.0 ** (-2 * pair / HEAD_DIM)
        a, b = x[2 * pair], x[2 * pair + 1]
        rotated[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
        rotated[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
    return rotated


def rotate_halves_reference(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of one head, first half against the second."""
    half = HEAD_DIM // 2
    angles = position * 10_000.0 ** (-2 * np.arange(half) / HEAD_DIM)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([x[:half] * cos - x[half:] * sin, x[:half] * sin + x[half:] * cos])


def test_reordered_rows_give_the_same_attention_scores_under_half_split_rotation():
    generator = np.random.default_rng(1)
    q_rows = generator.standard_normal((2 * HEAD_DIM, WIDTH)).astype(np.float32)
    k_rows = generator.standard_normal((2 * HEAD_DIM, WIDTH)).astype(np.float32)
    hidden = generator.standard_normal(WIDTH).astype(np.float32)
    scores = {}
    for form, rotate, reorder in (
        ("pairs", rotate_pairs_reference, lambda rows: rows),
        ("halves", rotate_halves_reference, lambda rows: half_split_rows(rows, 2)),
    ):
        q = (reorder(q_rows) @ hidden).reshape(2, HEAD_DIM)
        k = (reorder(k_rows) @ hidden).reshape(2, HEAD_DIM)
        scores[form] = [rotate(q[head], 7) @ rotate(k[head], 3) for head in range(2)]
    np.testing.assert_allclose(scores["halves"], scores["pairs"], rtol=1e-5)


def test_every_tensor_arrives_dequantised_under_its_hugging_face_name(tmp_path: Path):
    expected = write_gguf(tmp_path / "tiny.gguf")
    tensors = load_file(convert(tmp_path / "tiny.gguf", tmp_path / "model") / "model.safetensors")
    assert {weight.dtype for weight in tensors.values()} == {np.dtype(np.float32)}
    assert tensors.keys() == {hugging_face_name(name) for name in expected}
    for name, weight in expected.items():
        heads = {"blk.0.attn_q.weight": NUM_HEADS, "blk.0.attn_k.weight": NUM_KV_HEADS}
        if name in heads:
            weight = half_split_rows(weight, heads[name])
        np.testing.assert_array_equal(tensors[hugging_face_name(name)], weight)


def test_the_configuration_holds_what_the_metadata_says(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf")
    directory = convert(tmp_path / "tiny.gguf", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_attention_heads"] == NUM_HEADS
    assert config["num_key_value_heads"] == NUM_KV_HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert config["vocab_size"] == len(WORDS)
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
    assert tokenizer_config["bos_token"] == "<|im_start|>"
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}"


def test_digits_are_split_even_where_the_vocabulary_has_longer_numbers():
    tokenizer = build_tokenizer(
        tokens=WORDS, token_types=[3] * 3 + [1] * (len(WORDS) - 3), merges=MERGES
    )
    assert tokenizer.encode("ab12ab", add_special_tokens=False).tokens == ["ab", "1", "2", "ab"]
    assert tokenizer.encode("<|im_end|>12", add_special_tokens=False).ids[0] == 2


@pytest.mark.parametrize("changes", [{"pre": "llama-bpe"}, {"architecture": "bert"}])
def test_a_model_that_is_not_understood_is_refused_by_name(changes: dict, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelError, match="only '(smollm|llama)' can be converted"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_file_that_is_not_gguf_is_a_model_error(tmp_path: Path):
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind, but longer than a header")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(tmp_path / "no.gguf", tmp_path / "model")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk"])
def test_a_tensor_without_a_place_is_refused(name: str):
    with pytest.raises(ModelError, match="no place"):
        hugging_face_name(name)
