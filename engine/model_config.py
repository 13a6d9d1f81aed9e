"""What a model is, read from the config.json of a Hugging Face directory.

Owns the reading and the refusals: what this engine cannot run is refused here, with file and
field, never half run. Understands the Llama family: llama (SmolLM2 is one), mistral, qwen2, qwen3;
both spellings of the rotary settings (`rope_theta` + `rope_scaling`, and `rope_parameters`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON values

from core.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    kind is "linear" (Chen et al. 2023, position interpolation: all frequencies divided by
    `factor`) or "llama3" (Llama 3.1: only the slow ones, blended between the two factors).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder-only transformer of the Llama family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    has_tied_embeddings: bool = False
    has_attention_bias: bool = False
    has_qk_norm: bool = False

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def load_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json and generation_config.json.

    Raises:
        ModelError: a file is missing or no JSON, a field is missing or of the wrong type, or the
            model needs something that this engine does not have; names file and field.
    """
    fields = _Fields.read(directory / "config.json")
    family = fields.text("model_type")
    if family not in FAMILIES:
        fields.refuse("model_type", f"{family!r} is not one of {', '.join(FAMILIES)}")
    if fields.optional("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "only silu is supported")
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
    rope = _rope_fields(fields)
    config = ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_position_embeddings=fields.count("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(directory, fields),
        has_tied_embeddings=bool(fields.optional("tie_word_embeddings", False)),
        has_attention_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
    )
    _refuse_unsupported(fields, config)
    return config


class _Fields:
    """The fields of one JSON object, with errors that name the file and the field."""

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self._values = values
        self._file = file
        self._prefix = prefix

    @classmethod
    def read(cls, file: Path) -> "_Fields":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{file}: is no JSON object")
        return cls(values, file)

    def refuse(self, name: str, why: str) -> None:
        raise ModelError(f"{self._file}: {self._prefix}{name}: {why}")

    def optional(self, name: str, default: Any = None) -> Any:  # JSON value
        value = self._values.get(name)
        return default if value is None else value

    def text(self, name: str) -> str:
        value = self.optional(name)
        if not isinstance(value, str):
            self.refuse(name, f"needs a text, is {value!r}")
        return str(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.optional(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, f"needs a whole number of at least 1, is {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.refuse(name, f"needs a number over 0, is {value!r}")
        return float(value)

    def child(self, name: str) -> "_Fields":
        value = self.optional(name, {})
        if not isinstance(value, dict):
            self.refuse(name, f"needs an object, is {value!r}")
        return _Fields(value, self._file, f"{self._prefix}{name}.")


def _rope_fields(fields: _Fields) -> _Fields:
    name = "rope_parameters" if fields.optional("rope_parameters") else "rope_scaling"
    return fields.child(name)


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    kind = rope.optional("rope_type", rope.optional("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor"))
    if kind != "llama3":
        rope.refuse("rope_type", f"{kind!r} is not one of default, linear, llama3")
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def _eos_token_ids(directory: Path, fields: _Fields) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    value = _Fields.read(file).optional("eos_token_id") if file.exists() else None
    if value is None:
        value = fields.optional("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        fields.refuse("eos_token_id", f"needs token ids, is {value!r}")
    return tuple(ids)


def _refuse_unsupported(fields: _Fields, config: ModelConfig) -> None:
    if config.family != "qwen2" and fields.optional("attention_bias", False):
        fields.refuse("attention_bias", f"is not supported for {config.family}")
    if fields.optional("mlp_bias", False):
        fields.refuse("mlp_bias", "is not supported")
    if fields.optional("quantization_config") is not None:
        fields.refuse("quantization_config", "quantised checkpoints are not supported")
    window = fields.optional("sliding_window")
    is_used = config.family == "mistral" or fields.optional("use_sliding_window", False)
    if window is not None and is_used and window < config.max_position_embeddings:
        fields.refuse(
            "sliding_window",
            f"{window} tokens is shorter than max_position_embeddings "
            f"{config.max_position_embeddings}: windowed attention is not supported",
        )
