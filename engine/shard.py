"""Which part of each weight one rank of a worker holds.

Column and row sharding after Megatron-LM (Shoeybi et al. 2019, s.3): q, k, v, gate and up are cut
by output rows, o and down by input columns, so that a layer needs two sums over the ranks; the
vocabulary is cut for the logits, the embedding is whole on every rank. Pure arithmetic, no torch.
"""

from dataclasses import dataclass, replace

from core.errors import ConfigError
from core.layout import KVLayout
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of the weights of the `whole` model; `config` is the model as each rank sees it.

    Each rank has num_vocab_rows rows of logits; the last ones may lie past the vocabulary.
    """

    whole: ModelConfig
    config: ModelConfig
    rank: int
    size: int
    q_rows: range
    kv_rows: range
    ffn_rows: range
    vocab_rows: range
    num_vocab_rows: int


def shard_of(config: ModelConfig, layout: KVLayout, rank: int) -> Shard:
    """The share of `rank` in a model whose KV cache has `layout`.

    Raises:
        ConfigError: the heads or the feed-forward width cannot be divided; names the numbers.
    """
    size = layout.tensor_parallel_size
    _refuse_uneven(config, size)
    num_heads, num_ffn = config.num_heads // size, config.intermediate_size // size
    kv_heads, dim = layout.kv_heads_of(rank), config.head_dim
    num_vocab = -(-config.vocab_size // size)
    first = min(rank * num_vocab, config.vocab_size)
    return Shard(
        whole=config,
        config=replace(
            config,
            num_heads=num_heads,
            num_kv_heads=len(kv_heads),
            intermediate_size=num_ffn,
        ),
        rank=rank,
        size=size,
        q_rows=range(rank * num_heads * dim, (rank + 1) * num_heads * dim),
        kv_rows=range(kv_heads.start * dim, kv_heads.stop * dim),
        ffn_rows=range(rank * num_ffn, (rank + 1) * num_ffn),
        vocab_rows=range(first, min(first + num_vocab, config.vocab_size)),
        num_vocab_rows=num_vocab,
    )


def _refuse_uneven(config: ModelConfig, size: int) -> None:
    """Refuse shares that differ: the slowest rank would set the pace of every sum."""
    H, K = config.num_heads, config.num_kv_heads
    if H % size or (K % size and size % K):
        raise ConfigError(
            "tensor_parallel",
            f"{H} query heads and {K} key/value heads cannot be divided among {size} ranks",
        )
    if config.intermediate_size % size:
        raise ConfigError(
            "tensor_parallel",
            f"a feed-forward width of {config.intermediate_size} cannot be divided among "
            f"{size} ranks",
        )
