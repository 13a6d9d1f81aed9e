"""A model of random weights, made where it runs: what `check` measures without a checkpoint."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from core.layout import Dtype
from engine.kv_cache import TORCH_DTYPES
from engine.shard import Shard
from engine.weights import LayerWeights, ModelWeights

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}
TOY = LLAMA_8B | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


def write_model(directory: Path, config: dict[str, object]) -> Path:
    """A directory with a configuration, and a name in the place of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "model.safetensors").write_text("random", encoding="utf-8")
    return directory


def random_weights(
    directory: Path, shard: Shard, dtype: Dtype, device: torch.device
) -> ModelWeights:
    """Weights drawn on the device from one seed; a stand-in for `load_weights`, for one rank.

    Scaled so that the residual stream neither dies nor explodes and greedy tokens vary.
    """
    assert shard.size == 1, "random weights are not cut into shards"
    config, draw = shard.config, torch.Generator(device).manual_seed(0)
    M, V, F = config.hidden_size, config.vocab_size, config.intermediate_size
    Q, KV = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(height: int, width: int, scale: float) -> torch.Tensor:
        shape, format_ = (height, width), TORCH_DTYPES[dtype]
        drawn = torch.randn(shape, generator=draw, dtype=format_, device=device)
        return drawn.mul_(scale)

    ones = torch.ones(M, device=device)
    layers = [
        LayerWeights(
            input_norm_M=ones,
            qkv_OI=matrix(Q + 2 * KV, M, 1.5 / M**0.5),
            qkv_bias_O=None,
            q_norm_D=None,
            k_norm_D=None,
            output_OI=matrix(M, Q, 1.5 / Q**0.5),
            post_norm_M=ones,
            gate_up_OI=matrix(2 * F, M, 1.5 / M**0.5),
            down_OI=matrix(M, F, 1.5 / F**0.5),
        )
        for _ in range(config.num_layers)
    ]
    embedding_VM, lm_head_VM = matrix(V, M, 0.5), matrix(V, M, 0.5)
    return ModelWeights(embedding_VM, layers, ones, lm_head_VM)


class SharedWeights:
    """The same random weights for a card and for a CPU, drawn on the card."""

    def __init__(self, source: torch.device) -> None:
        self._source = source

    def __call__(
        self, directory: Path, shard: Shard, dtype: Dtype, device: torch.device
    ) -> ModelWeights:
        """See `LoadWeights`."""
        weights = random_weights(directory, shard, dtype, self._source)
        layers = [_moved(layer, device) for layer in weights.layers]
        return ModelWeights(
            weights.embedding_VM.to(device),
            layers,
            weights.final_norm_M.to(device),
            weights.lm_head_VM.to(device),
        )


def _moved(layer: LayerWeights, device: torch.device) -> LayerWeights:
    tensors: dict[str, Any] = {  # Any: some fields may be None
        f.name: tensor.to(device)
        for f in fields(layer)
        if (tensor := getattr(layer, f.name)) is not None
    }
    return replace(layer, **tensors)
