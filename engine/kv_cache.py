"""The paged KV cache of one rank of a worker: one tensor, laid out as `core.layout` says.

Owns the memory, not the bookkeeping (`block_pool` has that). The memory may be lent by the caller,
such as a shared-memory segment that another process maps. Letters: L layers, 2 = K then V,
N blocks, S slots per block, K key/value heads of the
rank, D head size.
"""

import torch

from core.layout import Dtype, KVLayout

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


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
