import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.layout import Dtype, KVLayout
from engine.model_config import load_model_config
from engine.shard import shard_of
from engine.weights import load_weights, weights_hash
from tests.tiny_model import write_tiny_model

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def load(directory, dtype=Dtype.FLOAT32):
    config = load_model_config(directory)
    layout = KVLayout("w", dtype, 4, config.num_layers, config.num_kv_heads, config.head_dim)
    return load_weights(directory, shard_of(config, layout, 0), dtype)


def split_into_shards(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_projections_are_merged_in_order_and_norms_stay_float32(tmp_path):
    tensors = load_file(write_tiny_model(tmp_path, model_type="qwen2") / "model.safetensors")
    weights = load(tmp_path, Dtype.BFLOAT16)
    layer = weights.layers[1]
    prefix = "model.layers.1.self_attn"
    merged = torch.cat([tensors[f"{prefix}.{x}_proj.weight"] for x in "qkv"]).bfloat16()
    assert torch.equal(layer.qkv_OI, merged)
    bias = torch.cat([tensors[f"{prefix}.{x}_proj.bias"] for x in "qkv"]).bfloat16()
    assert torch.equal(layer.qkv_bias_O, bias)
    assert torch.equal(layer.input_norm_M, tensors["model.layers.1.input_layernorm.weight"])


def test_tied_embeddings_are_one_tensor(tmp_path):
    weights = load(write_tiny_model(tmp_path, overrides={"tie_word_embeddings": True}))
    assert weights.lm_head_VM is weights.embedding_VM


def test_shards_hold_the_same_model(tmp_path):
    whole = load(write_tiny_model(tmp_path))
    split_into_shards(tmp_path)
    sharded = load(tmp_path)
    assert torch.equal(whole.layers[3].gate_up_OI, sharded.layers[3].gate_up_OI)
    assert torch.equal(whole.lm_head_VM, sharded.lm_head_VM)


def test_the_hash_tells_content_not_place(tmp_path):
    first, second, other = (tmp_path / name for name in "abc")
    for directory, seed in ((first, 1), (second, 1), (other, 2)):
        write_tiny_model(directory, seed=seed)
    assert weights_hash(first) == weights_hash(second)
    assert weights_hash(first) != weights_hash(other)
    assert len(weights_hash(first)) == 32
    with pytest.raises(ModelError, match="missing"):
        weights_hash(tmp_path / "missing")


def test_a_half_downloaded_file_is_named(tmp_path):
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    (write_tiny_model(tmp_path) / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    split_into_shards(write_tiny_model(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        weights_hash(tmp_path)


def test_an_index_without_a_map_is_named(tmp_path):
    (write_tiny_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    rewrite(write_tiny_model(tmp_path), lambda tensors: tensors.pop(K_PROJ))
    with pytest.raises(ModelError, match=f"{K_PROJ} is missing"):
        load(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    rewrite(write_tiny_model(tmp_path), lambda t: t.update({K_PROJ: torch.zeros(8, 64)}))
    with pytest.raises(ModelError, match=rf"{K_PROJ} has shape \(8, 64\).*\(32, 64\)"):
        load(tmp_path)


def test_quantised_tensors_are_refused(tmp_path):
    integers = torch.zeros(32, 64, dtype=torch.int8)
    rewrite(write_tiny_model(tmp_path), lambda t: t.update({K_PROJ: integers}))
    with pytest.raises(ModelError, match=f"{K_PROJ} is torch.int8"):
        load(tmp_path)
