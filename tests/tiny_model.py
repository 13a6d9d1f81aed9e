"""A tiny random model in Hugging Face format: what every test uses that needs no real text.

Four layers of width 64 with grouped-query attention, weights drawn from a seed, a byte-level BPE
tokenizer with three special tokens and a ChatML template. The same seed gives the same bytes.
Needs torch, safetensors and tokenizers, never transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTE_TOKENS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_tiny_model(
    directory: Path | str,
    *,
    seed: int = 0,
    model_type: str = "llama",
    vocab_size: int = 512,
    num_layers: int = 4,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, weights, tokenizer and generation settings; the directory, made if missing.

    qwen2 brings a bias on q, k, v; qwen3 brings q/k norms. `overrides` replaces fields of
    config.json, and shapes follow it: {"tie_word_embeddings": True}, {"rope_parameters": {...}},
    {"num_key_value_heads": 1}. Greedy output varies with the prompt and seldom ends by itself.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(model_type=model_type, vocab_size=vocab_size, num_layers=num_layers)
    config.update(overrides or {})
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID, "pad_token_id": IM_END_ID},
    )
    weights = tiny_weights(config, seed=seed)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tiny_tokenizer(directory, vocab_size=config["vocab_size"])
    return directory


def tiny_config(
    *, model_type: str = "llama", vocab_size: int = 512, num_layers: int = 4
) -> dict[str, Any]:
    """config.json of the tiny model, as recent transformers write it."""
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": IM_START_ID,
        "eos_token_id": IM_END_ID,
        "dtype": "float32",
        **({"sliding_window": None} if model_type == "mistral" else {}),
    }


def tiny_weights(config: Mapping[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face name, float32, drawn in the order of `tiny_shapes`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tiny_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.5 * noise
        elif name.startswith("model.layers."):
            weights[name] = noise * (1.5 / shape[-1] ** 0.5)
        else:
            weights[name] = noise * 0.5
    return weights


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of this configuration holds."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tiny_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json: ids 0-2 special, 256 bytes, then pairs.

    The pairs (" a", "ba", "ab") make tokens of more than one character; ids past the last pair
    have no text, as in checkpoints whose vocabulary is padded.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()[: vocab_size - len(SPECIAL_TOKENS) - NUM_BYTE_TOKENS]
    words = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _merges() -> list[tuple[str, str]]:
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    space = "\u0120"  # how byte-level BPE writes a space
    pairs = [(space, letter) for letter in vowels + consonants]
    pairs += [(consonant, vowel) for consonant in consonants for vowel in vowels]
    return (
        pairs
        + [(vowel, consonant) for vowel in vowels for consonant in consonants]
        + [(letter, letter) for letter in vowels + consonants]
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
