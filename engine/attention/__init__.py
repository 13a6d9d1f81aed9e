"""The one door to attention: every token of a batch attends to its sequence's paged KV cache.

`select_attention` chooses once and says why:

- `ReferenceAttention`: plain torch in float32 with an explicit mask. Never optimised; the twin
  that the others are compared with.
- `SdpaAttention`: torch's fused attention on gathered KV. Any device.
- `CpuAttention`: the same for prefill, and a compiled paged kernel for the rows of sequences with
  one new token (decode).
- `Flash2Attention`, `Flash3Attention`: flash-attn's kernels on CUDA, which read the pages where
  they lie. Their packages are imported here alone, when they are tried; `flash_double` has their
  entry points in plain torch.

The batch's own keys and values must already lie in the cache; they also come as tensors, so that
a sequence that starts at 0 needs no gather. Letters: B sequences, T tokens, H query heads,
K key/value heads, D head size, N blocks, S slots per block, P block-table width, L context length.
"""

from importlib import import_module

from engine.attention.cpu import CpuAttention
from engine.attention.flash2 import load_flash2
from engine.attention.flash3 import load_flash3
from engine.attention.interface import Attention, AttentionNeeds, ImportKernel, Unusable
from engine.attention.reference import ReferenceAttention
from engine.attention.sdpa import SdpaAttention

__all__ = [
    "Attention",
    "AttentionNeeds",
    "CpuAttention",
    "ReferenceAttention",
    "SdpaAttention",
    "select_attention",
]


def select_attention(
    needs: AttentionNeeds,
    *,
    capability: tuple[int, int] | None = None,
    import_kernel: ImportKernel = import_module,
) -> Attention:
    """The fastest implementation that works here; `.reason` says why this one.

    capability is the card's compute capability, None where there is none.

    Raises:
        ConfigError: the configured block size is none that the chosen kernel takes.
    """
    if capability is not None:
        return _on_card(needs, capability, import_kernel)
    if needs.device.type != "cpu":
        reason = f"{needs.device.type}: fused torch attention on gathered KV"
        return SdpaAttention(reason, needs.block_size)
    try:
        return CpuAttention(needs.head_dim, needs.block_size)
    except (ImportError, RuntimeError, ValueError) as error:
        reason = f"the paged kernel cannot be used ({error}): fused torch attention"
        return SdpaAttention(reason, needs.block_size)


def _on_card(
    needs: AttentionNeeds, capability: tuple[int, int], import_kernel: ImportKernel
) -> Attention:
    refusals = []
    for load in (load_flash3, load_flash2):
        try:
            attention = load(needs, capability, import_kernel)
        except Unusable as why:
            refusals.append(str(why))
            continue
        attention.reason = "; ".join([attention.reason, *refusals])
        return attention
    reason = "; ".join(["fused torch attention on gathered KV", *refusals])
    return SdpaAttention(reason, needs.block_size)
