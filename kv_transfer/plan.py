"""Which bytes of a handoff travel in which piece.

Pure arithmetic: knows neither tensors nor transports. A span is a rectangle of layers x blocks,
both K and V. Its bytes in *plan order* are its pages, layer by layer, K before V, blocks in the
order of the reservation: the order of checksums and of staging buffers on both sides.
"""

from dataclasses import dataclass

from core.layout import KVLayout
from core.link import Span
from core.request import RequestId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that a decode worker set aside for one request, and what already lies in them.

    block_ids are the decode worker's cache blocks, those of the prompt first. The first
    num_cached_blocks already hold the prompt's prefix and are not shipped.
    """

    request_id: RequestId
    epoch: int
    block_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_blocks: int = 0

    def shipped_blocks(self, layout: KVLayout) -> range:
        """Indices into block_ids of the blocks that the prefill worker has to fill."""
        return range(self.num_cached_blocks, layout.num_blocks(self.num_prompt_tokens))


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Bounds of a piece in bytes.

    min_bytes: layers of a chunk that is still being computed wait until this much is ready; what
    completes a chunk goes at once, however small. max_bytes: the backend's limit.
    """

    min_bytes: int
    max_bytes: int


def span_bytes(layout: KVLayout, span: Span) -> int:
    """Bytes of the span's pages."""
    return span.num_layers * span.num_blocks * 2 * layout.page_bytes


def plan_spans(
    layout: KVLayout, *, layers: range, blocks: range, max_bytes: int
) -> tuple[Span, ...]:
    """Spans that cover these layers of these blocks exactly once, cut by layers, then by blocks.

    Each is at most `max_bytes`, unless one layer of one block is already more: that is the
    smallest span there is. Sizes differ as little as possible.
    """
    if not layers or not blocks:
        return ()
    layer_of_block_bytes = 2 * layout.page_bytes
    layers_per_span = max(1, max_bytes // (len(blocks) * layer_of_block_bytes))
    blocks_per_span = len(blocks)
    if layers_per_span == 1:
        blocks_per_span = max(1, max_bytes // layer_of_block_bytes)
    return tuple(
        Span(layers.start + first_layer, num_layers, blocks.start + first_block, num_blocks)
        for first_layer, num_layers in _even_cuts(len(layers), layers_per_span)
        for first_block, num_blocks in _even_cuts(len(blocks), blocks_per_span)
    )


def _even_cuts(length: int, limit: int) -> list[tuple[int, int]]:
    """(start, size) of the fewest parts of `length` that are at most `limit` long."""
    num_parts = -(-length // limit)
    edges = [length * part // num_parts for part in range(num_parts + 1)]
    return [(start, end - start) for start, end in zip(edges, edges[1:], strict=False)]
