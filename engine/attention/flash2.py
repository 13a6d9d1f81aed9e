"""FlashAttention 2 (package `flash-attn`): paged attention on Ampere and newer cards.

Decode steps go through `flash_attn_with_kvcache`, which splits long histories over the card; all
others, also those that mix prompts and decode, are one call of `flash_attn_varlen_func` over the
paged cache. Limits as its sources (flash_attn_interface.py, csrc/flash_attn/flash_api.cpp) check
them, up to 2.8.3. Later sources read the largest length back to the host in each decode call,
which no CUDA graph allows. Letters as in `engine.attention`.
"""

from typing import Any  # flash-attn has no types

import torch

from core.errors import ConfigError
from engine.attention.interface import AttentionNeeds, ImportKernel
from engine.attention.probe import import_or_refuse, probe, refuse_what_no_flash_takes
from engine.batch import Batch

NAME = "flash-attn 2"
PACKAGE = "flash_attn"
PAGE_MULTIPLE = 256
OLDEST = (8, 0)


class Flash2Attention:
    """Calls `kernels`: the package `flash_attn`, or its double."""

    def __init__(self, kernels: Any, *, block_size: int, reason: str) -> None:
        self.name = NAME
        self.reason = reason
        self.block_size = block_size
        self._kernels = kernels

    def graph_widths(self, num_sequences: int, max_width: int) -> tuple[int, ...]:
        """See `Attention`: unused places of a table cost nothing."""
        return (max_width,)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_2NSKD: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """See `Attention`."""
        k_NSKD, v_NSKD = kv_2NSKD.unbind(0)
        if batch.is_decode:
            out_B1HD: torch.Tensor = self._kernels.flash_attn_with_kvcache(
                q_THD.unsqueeze(1),
                k_NSKD,
                v_NSKD,
                cache_seqlens=batch.context_lens_B,
                block_table=batch.block_tables_BP,
                causal=True,
            )
            return out_B1HD.squeeze(1)
        out_THD: torch.Tensor = self._kernels.flash_attn_varlen_func(
            q_THD,
            k_NSKD,
            v_NSKD,
            batch.query_starts_B1,
            batch.key_starts_B1,
            batch.max_query_tokens,
            batch.max_context_tokens,
            causal=True,
            block_table=batch.block_tables_BP,
        )
        return out_THD


def load_flash2(
    needs: AttentionNeeds, capability: tuple[int, int], import_kernel: ImportKernel
) -> Flash2Attention:
    """The kernel, after a first call on the card.

    Raises:
        Unusable: it is not there, or does not serve these needs.
        ConfigError: the configured block size is not one of its page sizes.
    """
    refuse_what_no_flash_takes(NAME, needs, capability, oldest=OLDEST)
    kernels = import_or_refuse(NAME, PACKAGE, import_kernel)
    if needs.block_size is not None and needs.block_size % PAGE_MULTIPLE:
        raise ConfigError(
            "block_size",
            f"is {needs.block_size}: the pages of {NAME}, which is installed here, are multiples "
            f"of {PAGE_MULTIPLE} tokens",
            str(PAGE_MULTIPLE),
        )
    version = getattr(kernels, "__version__", "of unknown version")
    card = ".".join(map(str, capability))
    attention = Flash2Attention(
        kernels,
        block_size=needs.block_size or PAGE_MULTIPLE,
        reason=f"package flash-attn {version} on compute capability {card}",
    )
    probe(attention, needs)
    return attention
