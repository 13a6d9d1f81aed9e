"""How KV blocks lie in memory, and the fingerprint that two workers compare before a handoff.

A *block* holds K and V of `block_size` consecutive tokens for all layers. In memory the cache of
one worker is one tensor of shape (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim),
2 being K then V: so the smallest contiguous run that belongs to one block is a *page*, K or V of
one block in one layer (the shape that paged attention kernels take).
"""

import hashlib
from dataclasses import dataclass, fields, replace
from enum import StrEnum

PROTOCOL_VERSION = 1


class Dtype(StrEnum):
    """Number format of weights, activations and KV cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is Dtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV cache of one worker lies in memory, over all its ranks.

    num_kv_heads are those of the whole model. Each of tensor_parallel_size ranks holds a share of
    them in a cache of its own, or a copy of one head where there are more ranks than heads.
    """

    weights_hash: str
    dtype: Dtype
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int = 1
    protocol_version: int = PROTOCOL_VERSION

    @property
    def num_rank_kv_heads(self) -> int:
        """Key/value heads in the cache of one rank."""
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    def kv_heads_of(self, rank: int) -> range:
        """Which of the model's key/value heads lie in the cache of `rank`."""
        first = rank * self.num_kv_heads // self.tensor_parallel_size
        return range(first, first + self.num_rank_kv_heads)

    @property
    def page_bytes(self) -> int:
        """Bytes of K (or of V) of one block in one layer, over all ranks."""
        return self.tensor_parallel_size * self.rank_page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.num_layers * 2 * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.block_bytes // self.block_size

    @property
    def rank_page_bytes(self) -> int:
        """Bytes of a page in the cache of one rank: the smallest contiguous run of one block."""
        return self.block_size * self.num_rank_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def rank_block_bytes(self) -> int:
        """Bytes of one block in the cache of one rank, over all layers, K and V."""
        return self.num_layers * 2 * self.rank_page_bytes

    @property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly when every field is."""
        text = "|".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def obstacles(self, other: "KVLayout", *, may_convert_dtype: bool) -> str:
        """Why KV blocks of this layout cannot become blocks of `other`; empty when they can.

        Block size and tensor-parallel size may differ, the number format if it may be converted.
        """
        if self == other:
            return ""
        reshaped = replace(
            self, block_size=other.block_size, tensor_parallel_size=other.tensor_parallel_size
        )
        if may_convert_dtype:
            reshaped = replace(reshaped, dtype=other.dtype)
        problem = reshaped.differences(other)
        return f"{problem} ({self} != {other})" if problem else ""

    def __str__(self) -> str:
        """For people, on one line."""
        return (
            f"{self.dtype} blocks of {self.block_size} tokens, {self.num_layers} layers, "
            f"{self.num_kv_heads} key/value heads of {self.head_dim} over "
            f"{self.tensor_parallel_size} ranks, weights {self.weights_hash[:8]}, "
            f"protocol {self.protocol_version}"
        )

    def differences(self, other: "KVLayout") -> str:
        """Fields whose values differ, with both values, for people; empty when equal."""
        return ", ".join(
            f"{f.name} {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        )
