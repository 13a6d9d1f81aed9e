"""The paged KV cache of one rank of a worker: one tensor, laid out as `core.layout` says.

Owns the memory, not the bookkeeping (`block_pool` has that). The memory may be lent by the caller,
such as a shared-memory segment that another process maps. Letters: L layers, 2 = K then V,
N blocks, S slots per block, K key/value heads of the
rank, D head size.
"""

import torch

from core.errors import ConfigError
from core.layout import Dtype, KVLayout

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


DEFAULT_BYTES = 1 << 30
# Of a card's memory that is free once the weights are there; the rest is for what a step computes
# with, for graphs, and for what links stage.
CARD_SHARE = 0.85


def num_cache_blocks(
    layout: KVLayout,
    *,
    kv_cache_bytes: int | None,
    free_bytes: int | None,
    num_scratch_blocks: int = 0,
) -> int:
    """How many blocks the caches have, scratch blocks included.

    kv_cache_bytes are those of all ranks. None is DEFAULT_BYTES or, where free_bytes tells how much
    memory each rank's card has left, CARD_SHARE of that.

    Raises:
        ConfigError: there is no room for a block, or less memory is free than was asked for.
    """
    size = layout.tensor_parallel_size
    if free_bytes is not None:
        if kv_cache_bytes is None:
            kv_cache_bytes = int(size * free_bytes * CARD_SHARE)
        if kv_cache_bytes > size * free_bytes:
            raise ConfigError(
                "kv_cache_bytes",
                f"{kv_cache_bytes} bytes for {size} ranks, and a card has {free_bytes} free bytes "
                "with the weights in it",
            )
    kv_cache_bytes = DEFAULT_BYTES if kv_cache_bytes is None else kv_cache_bytes
    block_bytes = size * layout.rank_block_bytes
    num_blocks = kv_cache_bytes // block_bytes
    if num_blocks < 1 + num_scratch_blocks:
        raise ConfigError(
            "kv_cache_bytes",
            f"{kv_cache_bytes} bytes hold no block: one block of {layout.block_size} tokens "
            f"takes {block_bytes} bytes",
        )
    return num_blocks


class KVCache:
    """`num_blocks` blocks of `layout` as `kv_L2NSKD`.

    Invariant: block b of layer l holds K at kv_L2NSKD[l, 0, b] and V at kv_L2NSKD[l, 1, b], each a
    contiguous page of `layout.rank_page_bytes`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        storage: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Lie upon `storage` (flat uint8, kept alive by this object) or allocate zeros.

        Zeroed memory costs nothing until a block is first written.

        Raises:
            ValueError: `storage` is not flat uint8 or too small for `num_blocks`.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = layout.rank_block_bytes * num_blocks
        if storage is None:
            storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < num_bytes:
            raise ValueError(
                f"{num_blocks} blocks need {num_bytes} flat bytes; got "
                f"{storage.numel()} x {storage.dtype} of {storage.dim()} dimensions"
            )
        shape = [layout.num_layers, 2, num_blocks, layout.block_size]
        shape += [layout.num_rank_kv_heads, layout.head_dim]
        self.kv_L2NSKD = storage[:num_bytes].view(TORCH_DTYPES[layout.dtype]).view(shape)

    def layer(self, index: int) -> torch.Tensor:
        """K and V of one layer as a view of shape (2, N, S, K, D)."""
        return self.kv_L2NSKD[index]
