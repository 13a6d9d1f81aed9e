"""The weights of a model, read from safetensors and checked before use.

Owns the reading, the refusals (file and tensor are named) and the merging: q, k, v become one
matrix, gate and up another, so that a step makes four products per layer. Nothing is converted
twice, and one layer at a time is in memory beside the result; of sharded tensors only the rank's
part is read. Letters: M model width, V vocabulary, O and I output and input width.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # safetensors has no types

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from core.errors import ModelError
from core.layout import Dtype
from engine.kv_cache import TORCH_DTYPES
from engine.shard import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are float32, the others in the model's format."""

    input_norm_M: torch.Tensor
    qkv_OI: torch.Tensor
    qkv_bias_O: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output_OI: torch.Tensor
    post_norm_M: torch.Tensor
    gate_up_OI: torch.Tensor
    down_OI: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of one rank, its own rows of lm_head_VM, the whole embedding_VM.

    With one rank, lm_head_VM is embedding_VM itself where the two are tied.
    """

    embedding_VM: torch.Tensor
    layers: list[LayerWeights]
    final_norm_M: torch.Tensor
    lm_head_VM: torch.Tensor


LoadWeights = Callable[[Path, Shard, Dtype, torch.device], ModelWeights]


def load_weights(
    directory: Path,
    shard: Shard,
    dtype: Dtype,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """Read a rank's part of the checkpoint in `directory`, a single file or an index of files.

    Raises:
        ModelError: a file is missing, truncated or no safetensors; a tensor is missing or has
            another shape than the model's.
    """
    config = shard.config
    with ExitStack() as stack:
        checkpoint = _Checkpoint(directory, stack, dtype=TORCH_DTYPES[dtype], device=device)
        width, vocab = config.hidden_size, config.vocab_size
        embedding = checkpoint.read("model.embed_tokens.weight", (vocab, width))
        if config.has_tied_embeddings:
            rows = slice(shard.vocab_rows.start, shard.vocab_rows.stop)
            lm_head = embedding if shard.size == 1 else embedding[rows]
        else:
            lm_head = checkpoint.read("lm_head.weight", (vocab, width), rows=shard.vocab_rows)
        if num_missing := shard.num_vocab_rows - len(lm_head):
            lm_head = torch.cat([lm_head, lm_head.new_zeros(num_missing, width)])
        layers = [_read_layer(checkpoint, shard, i) for i in range(config.num_layers)]
        final_norm = checkpoint.read_norm("model.norm.weight", width)
    return ModelWeights(embedding, layers, final_norm, lm_head)


def weights_hash(directory: Path) -> str:
    """32 hex digits over config.json and all weight files: equal for equal content.

    XXH3-128, as fast as memory is read; made to tell checkpoints apart, not to resist forgery.

    Raises:
        ModelError: a file is missing or unreadable.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(HASH_CHUNK_BYTES))
    for file in (directory / "config.json", *_weight_files(directory)):
        try:
            with file.open("rb", buffering=0) as stream:
                while num_bytes := stream.readinto(buffer):
                    digest.update(buffer[:num_bytes])
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    return digest.hexdigest()


class _Checkpoint:
    """Tensors by name over all shards; the files stay open as long as the stack."""

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._reader_of = {}
        for file in _weight_files(directory):
            try:
                reader = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: is missing or damaged: {error}") from error
            self._reader_of.update({name: (file, reader) for name in reader.keys()})

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """Those rows and columns (None: all) of a tensor of `shape`, in the model's format."""
        file, part = self._find(name, shape)
        where = tuple(
            slice(None) if span is None else slice(span.start, span.stop)
            for span in (rows, columns)[: len(shape)]
        )
        tensor: torch.Tensor = part[where]
        if not tensor.is_floating_point():
            raise ModelError(f"{file}: tensor {name} is {tensor.dtype}: quantised weights")
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def read_norm(self, name: str, length: int) -> torch.Tensor:
        """The weight of a norm, float32 whatever the model's format."""
        _, part = self._find(name, (length,))
        norm: torch.Tensor = part[:]
        return norm.to(device=self._device, dtype=torch.float32)

    def read_below(
        self, names: Iterable[str], heights: Iterable[int], rows: Iterable[range], *rest: int
    ) -> torch.Tensor:
        """Those rows of tensors of shape (height, *rest), below each other."""
        parts = zip(names, heights, rows, strict=True)
        return torch.cat([self.read(n, (h, *rest), rows=r) for n, h, r in parts])

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any]:
        """The file that holds a tensor, and the tensor as safetensors' untyped slice."""
        if name not in self._reader_of:
            raise ModelError(f"{self._directory}: tensor {name} is missing")
        file, reader = self._reader_of[name]
        part = reader.get_slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ModelError(f"{file}: tensor {name} has shape {found}, the model needs {shape}")
        return file, part


def _read_layer(checkpoint: _Checkpoint, shard: Shard, index: int) -> LayerWeights:
    prefix, whole = f"model.layers.{index}", shard.whole
    width, ffn, size = whole.hidden_size, whole.intermediate_size, whole.head_dim
    q, kv = whole.num_heads * size, whole.num_kv_heads * size
    attention = f"{prefix}.self_attn"
    heights, rows = (q, kv, kv), (shard.q_rows, shard.kv_rows, shard.kv_rows)
    gate_up = [f"{prefix}.mlp.{x}_proj.weight" for x in ("gate", "up")]

    def norm(name: str, length: int) -> torch.Tensor:
        return checkpoint.read_norm(f"{prefix}.{name}.weight", length)

    qkv_bias = None
    if whole.has_attention_bias:
        biases = [f"{attention}.{x}_proj.bias" for x in "qkv"]
        qkv_bias = checkpoint.read_below(biases, heights, rows)
    qkv = [f"{attention}.{x}_proj.weight" for x in "qkv"]
    output, down = f"{attention}.o_proj.weight", f"{prefix}.mlp.down_proj.weight"
    return LayerWeights(
        input_norm_M=norm("input_layernorm", width),
        qkv_OI=checkpoint.read_below(qkv, heights, rows, width),
        qkv_bias_O=qkv_bias,
        q_norm_D=norm("self_attn.q_norm", size) if whole.has_qk_norm else None,
        k_norm_D=norm("self_attn.k_norm", size) if whole.has_qk_norm else None,
        output_OI=checkpoint.read(output, (width, q), columns=shard.q_rows),
        post_norm_M=norm("post_attention_layernorm", width),
        gate_up_OI=checkpoint.read_below(gate_up, (ffn, ffn), (shard.ffn_rows,) * 2, width),
        down_OI=checkpoint.read(down, (width, ffn), columns=shard.ffn_rows),
    )


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.exists():
        raise ModelError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: is no index of weights: {error}") from error
    return [directory / name for name in sorted(names)]
