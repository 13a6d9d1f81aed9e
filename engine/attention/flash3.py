"""FlashAttention 3, the forward pass for Hopper cards: paged attention with any page size.

One entry point, `flash_attn_with_kvcache`, serves prompts (with cu_seqlens_q) and decode (without).
Two packages bring it: `flash_attn_interface` (built from the folder hopper of the sources) and
`fa3_fwd_interface` (prebuilt wheels). Of the latter, 0.0.3 was built without paged KV for short
queries: its first decode call says so, and the next kernel is taken (`engine.attention.probe`).
Limits as hopper/flash_api.cpp checks them. Letters as in `engine.attention`.
"""

from typing import Any  # flash-attn has no types

import torch

from engine.attention.interface import AttentionNeeds, ImportKernel, Unusable
from engine.attention.probe import import_or_refuse, probe, refuse_what_no_flash_takes
from engine.batch import Batch

NAME = "flash-attn 3"
PACKAGES = ("flash_attn_interface", "fa3_fwd_interface")
HOPPER = 9
# Any would do. Larger blocks make fewer and longer pieces of a handoff.
BLOCK_SIZE = 64


class Flash3Attention:
    """Calls `kernels`: one of PACKAGES, or their double."""

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
        history = {"cache_seqlens": batch.context_lens_B, "page_table": batch.block_tables_BP}
        if batch.is_decode:
            out_B1HD: torch.Tensor = self._kernels.flash_attn_with_kvcache(
                q_THD.unsqueeze(1), k_NSKD, v_NSKD, causal=True, **history
            )
            return out_B1HD.squeeze(1)
        out_THD: torch.Tensor = self._kernels.flash_attn_with_kvcache(
            q_THD,
            k_NSKD,
            v_NSKD,
            cu_seqlens_q=batch.query_starts_B1,
            max_seqlen_q=batch.max_query_tokens,
            causal=True,
            **history,
        )
        return out_THD


def load_flash3(
    needs: AttentionNeeds, capability: tuple[int, int], import_kernel: ImportKernel
) -> Flash3Attention:
    """The kernel, after a first call on the card.

    Raises:
        Unusable: it is not there, or does not serve these needs.
    """
    refuse_what_no_flash_takes(NAME, needs, capability, oldest=(HOPPER, 0))
    if capability[0] != HOPPER:
        raise Unusable(f"{NAME} is for Hopper cards")
    refusals = []
    for package in PACKAGES:
        try:
            kernels = import_or_refuse(f"{NAME} ({package})", package, import_kernel)
            attention = Flash3Attention(
                kernels,
                block_size=needs.block_size or BLOCK_SIZE,
                reason=f"package {package} on a Hopper card",
            )
            probe(attention, needs)
        except Unusable as why:
            refusals.append(str(why))
        else:
            return attention
    raise Unusable("; ".join(refusals))
