"""What keeps a flash-attn kernel from being taken, found before a request depends on it.

A package that imports may still have been built for other cards, for another torch, or without a
feature; only a call tells. `probe` makes one decode and one mixed call on a tiny cache.
"""

from collections.abc import Sequence
from typing import Any  # flash-attn's packages have no types

import torch

from engine.attention.interface import Attention, AttentionNeeds, ImportKernel, Unusable
from engine.batch import Array, SequenceStep, build_batch, upload_to_host

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
FORMATS = (torch.float16, torch.bfloat16)


def refuse_what_no_flash_takes(
    name: str, needs: AttentionNeeds, capability: tuple[int, int], *, oldest: tuple[int, int]
) -> None:
    """Refuse number formats, head sizes and cards that the kernels check for.

    Raises:
        Unusable: with the value and the limit.
    """
    if capability < oldest:
        card, least = (f"{major}.{minor}" for major, minor in (capability, oldest))
        raise Unusable(f"{name} needs compute capability {least}, the card has {card}")
    if needs.dtype not in FORMATS:
        raise Unusable(f"{name} takes float16 and bfloat16, not {_name_of(needs.dtype)}")
    if needs.head_dim > MAX_HEAD_DIM or needs.head_dim % HEAD_DIM_MULTIPLE:
        raise Unusable(
            f"{name} takes head sizes up to {MAX_HEAD_DIM} in steps of {HEAD_DIM_MULTIPLE}, "
            f"not {needs.head_dim}"
        )


def import_or_refuse(name: str, package: str, import_kernel: ImportKernel) -> Any:
    """The package; Unusable if it is missing or does not load."""
    try:
        return import_kernel(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise Unusable(f"{name} is not installed") from error
        raise Unusable(f"{name} cannot be loaded: {error}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise Unusable(f"{name} cannot be loaded: {_first_line(error)}") from error


def probe(attention: Attention, needs: AttentionNeeds) -> None:
    """Make a decode call and a mixed call, and look at what came out.

    Raises:
        Unusable: a call failed, or gave something that is no number.
    """
    size = attention.block_size
    kv_shape = (2, 3, size, needs.num_kv_heads, needs.head_dim)
    kv_2NSKD = torch.ones(kv_shape, dtype=needs.dtype, device=needs.device)
    decode = [SequenceStep([0], size, (2, 0), None), SequenceStep([0], 0, (1,), None)]
    mixed = [SequenceStep([0] * 2, size - 1, (2, 0), None), SequenceStep([0], 0, (1,), None)]

    def upload(arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [tensor.to(needs.device) for tensor in upload_to_host(arrays)]

    for steps in (decode, mixed):
        batch = build_batch(steps, block_size=size, upload=upload)
        q_shape = (batch.num_tokens, needs.num_heads, needs.head_dim)
        q_THD = torch.ones(q_shape, dtype=needs.dtype, device=needs.device)
        fresh = kv_2NSKD.flatten(1, 2)[:, : batch.num_tokens]
        try:
            out_THD = attention.paged_attention(q_THD, fresh[0], fresh[1], kv_2NSKD, batch)
            is_right = out_THD.shape == q_shape and bool((out_THD == 1).all())
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
            raise Unusable(f"{attention.name} failed: {_first_line(error)}") from error
        if not is_right:  # the mean of ones
            raise Unusable(f"{attention.name} gave wrong numbers")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
