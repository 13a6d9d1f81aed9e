"""A GGUF file of a Llama model -> a directory in Hugging Face format, float32.

Owns the meaning of GGUF metadata: tensor names, the row order of q and k, the tokenizer. It does
not know where the file came from nor where the directory goes (that is `model_store`), and it
needs no torch. Runs once per model, in whichever process fetched it.

Two things that are easy to get wrong:

1. GGUF keeps the rows of q and k interleaved for rotary embedding over adjacent pairs; Hugging
   Face checkpoints rotate the first half against the second. The permutation is undone here.
2. The `smollm` pre-tokenizer splits off every single digit before the byte-level step.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from rich.progress import Progress
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import ModelError

_ARCHITECTURE = "llama"
_PRE_TOKENIZER = "smollm"
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(gguf_path: Path, directory: Path, *, progress: Progress) -> None:
    """Fill `directory` with weights, configuration and tokenizer of the model at `gguf_path`.

    Raises:
        ModelError: the file is not a Llama model with the tokenizer that is understood here.
    """
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{gguf_path} is not a GGUF file: {error}") from error
    metadata = _Metadata(reader)
    metadata.expect("general.architecture", _ARCHITECTURE)
    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", _PRE_TOKENIZER)

    task = progress.add_task("dequantise", total=len(reader.tensors))
    tensors = {}
    for name, weight in _dequantised(reader, metadata):
        tensors[name] = weight
        progress.advance(task)

    task = progress.add_task("write", total=1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _model_config(metadata, tensors))
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(metadata))
    build_tokenizer(
        tokens=metadata["tokenizer.ggml.tokens"],
        token_types=metadata["tokenizer.ggml.token_type"],
        merges=metadata["tokenizer.ggml.merges"],
    ).save(str(directory / "tokenizer.json"))
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    progress.advance(task)


class _Metadata:
    """Key-value pairs of a GGUF file; a missing key is a ModelError that names it."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self._contents: dict[str, Any] = {}  # reading a vocabulary takes half a second

    def __getitem__(self, key: str) -> Any:  # the file decides the type
        if key not in self._contents:
            field = self._fields.get(key)
            if field is None:
                raise ModelError(f"the GGUF file lacks {key}")
            self._contents[key] = field.contents()
        return self._contents[key]

    def expect(self, key: str, value: str) -> None:
        """Refuse any other value of `key` than the one that the conversion was written for."""
        if self[key] != value:
            raise ModelError(f"{key} is {self[key]!r}: only {value!r} can be converted")


def _dequantised(
    reader: GGUFReader, metadata: _Metadata
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each tensor under its Hugging Face name, float32, shape (out, in)."""
    num_heads = metadata["llama.attention.head_count"]
    num_kv_heads = metadata["llama.attention.head_count_kv"]
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            weight = half_split_rows(weight, num_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = half_split_rows(weight, num_kv_heads)
        yield name, np.ascontiguousarray(weight)


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix != "blk" or suffix not in _LAYER_NAMES:
        raise ModelError(f"tensor {gguf_name} has no place in a Llama checkpoint")
    return f"model.layers.{layer}.{_LAYER_NAMES[suffix]}"


def half_split_rows(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows reordered per head from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    Args:
        weight: (num_heads * head_dim, in), the order that GGUF stores.
        num_heads: heads of this projection, which for k are the key/value heads.
    """
    num_rows, width = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def build_tokenizer(*, tokens: list[str], token_types: list[int], merges: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with every digit on its own and control tokens kept whole."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _model_config(
    metadata: _Metadata, tensors: dict[str, NDArray[np.float32]]
) -> dict[str, object]:
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": _shortest_float32(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest_float32(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "torch_dtype": "float32",
        **_special_ids(metadata),
    }


def _generation_config(metadata: _Metadata) -> dict[str, object]:
    return {"_from_model_config": True, **_special_ids(metadata)}


def _special_ids(metadata: _Metadata) -> dict[str, object]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(metadata: _Metadata) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **{
            f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for role, key in roles.items()
        },
    }


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
