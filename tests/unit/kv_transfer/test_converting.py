"""Pieces of one number format arrive in another, value by value, whatever the shapes."""

import pytest
import torch

from core.layout import Dtype, KVLayout
from core.link import PieceId, Span
from kv_transfer.converting import MAX_PIECE_BYTES, ConvertingSender
from kv_transfer.memory import MemoryBackend
from kv_transfer.pages import view_as_pages
from kv_transfer.reshape import CacheShape, Reshape, source_blocks

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 8
FORMATS = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
SPAN = Span(1, 2, 0, 2)
TARGET_BLOCKS = [4, 2]


def shape_of(dtype, block_size, size, num_blocks):
    layout = KVLayout("w", dtype, block_size, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, size)
    return CacheShape(layout, num_blocks)


def caches_of(shape, seed=None):
    """The caches of all ranks in one storage; random if there is a seed."""
    layout = shape.layout
    sizes = (layout.tensor_parallel_size, NUM_LAYERS, 2, shape.num_blocks, layout.block_size)
    sizes += (layout.num_rank_kv_heads, HEAD_DIM)
    if seed is None:
        return torch.zeros(sizes, dtype=FORMATS[layout.dtype])
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(
        FORMATS[layout.dtype]
    )


def tokens_of(caches, block_ids):
    """Layers, K and V, tokens, heads of the model, values."""
    kv_RL2TKD = caches[:, :, :, block_ids].flatten(3, 4)
    return torch.cat(kv_RL2TKD.unbind(), dim=3)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    "formats", [(Dtype.FLOAT32, Dtype.BFLOAT16), (Dtype.BFLOAT16, Dtype.FLOAT32)]
)
def test_values_are_rounded_to_the_target_s_format(formats, sizes):
    source_shape = shape_of(formats[0], 4, sizes[0], 6)
    target_shape = shape_of(formats[1], 8, sizes[1], 5)
    source, target = caches_of(source_shape, seed=1), caches_of(target_shape)
    reshape = Reshape(source_shape, target_shape)

    def pages(caches, layout):
        return view_as_pages(caches[0], reshape.page.num_per_block(layout))

    backend = MemoryBackend()
    offer, receiver = backend.offer("link", pages(target, target_shape.layout))
    sender = ConvertingSender(
        pages(source, source_shape.layout),
        FORMATS[formats[1]],
        num_block_pages=reshape.num_block_pages,
        connect=lambda converted: backend.connect(offer, converted, 1.0),
    )
    source_table = [5, 0, 3, 1]
    checksum = sender.send(
        PieceId(1, 0),
        reshape.span(SPAN),
        reshape.source_pages(
            SPAN, source_table[source_blocks(SPAN, source_shape.layout, target_shape.layout)]
        ),
        reshape.target_pages(TARGET_BLOCKS),
    )
    assert receiver.take(reshape.span(SPAN), reshape.target_pages(TARGET_BLOCKS)) == checksum

    arrived, sent = tokens_of(target, TARGET_BLOCKS), tokens_of(source, source_table)
    assert torch.equal(arrived[SPAN.layers], sent[SPAN.layers].to(arrived.dtype))
    assert not arrived[0].any()
    assert 0 < sender.max_piece_bytes <= MAX_PIECE_BYTES
    assert sender.has_room()
    sender.acknowledge(PieceId(1, 0))
    sender.close()
    assert receiver.is_writer_gone()
