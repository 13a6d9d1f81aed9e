"""Paged attention of single query tokens on a CPU, compiled by numba.

One sequence at a time: scores of all heads over all blocks, softmax, weighted sum of V. The query
heads that share a key/value head are taken together, so each row of a page is widened once, and
their queries or sums stay in registers; the same row of the next page is fetched meanwhile, since
the processor cannot guess where it lies (-40 % at 8 x 512 tokens). After PagedAttention (vLLM,
SOSP'23, s.4.2); two passes with a score row per head instead of online softmax, since on a CPU the
scores stay in the second-level cache. bfloat16 as uint16 bits.

Letters: B sequences, T tokens, H query heads, K key/value heads, D head size, N blocks, S slots,
P block-table width, L context length, G heads taken together.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from engine.attention.vectors import LANE_WIDTH, add_weighted, load, prefetch, store, store_dots
from engine.kernels import ONE, ZERO, Array, compiled, exp, narrow, widen

TILE_SIZE = 512  # numbers in 32 registers of 16: a few spilled cost less than rows widened twice
TOKENS_AT_ONCE = 4  # what store_dots takes
ONE_HEAD = (0,)
Tile = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache
def tile_of(num_groups: int, head_dim: int) -> Tile:
    """The first argument of the kernel: G and D / 8 as tuples of zeros of that length.

    G divides the group, the heads that share a key/value head. Lengths of tuples are constants of
    the compiled code.

    Raises:
        ValueError: head_dim is not a multiple of 8.
    """
    if head_dim % LANE_WIDTH:
        raise ValueError(f"head size {head_dim} is not a multiple of {LANE_WIDTH}")
    most = max(1, TILE_SIZE // head_dim)
    num_heads = max(g for g in range(1, most + 1) if num_groups % g == 0)
    return (0,) * num_heads, (0,) * (head_dim // LANE_WIDTH)


@compiled
def decode_attention(
    tile: Tile,
    q_THD: Array,
    kv_2NSKD: Array,
    where: tuple[Array, Array, Array, Array],
    scale: np.float32,
    out_THD: Array,
) -> None:
    """Attention of some rows of q, each over the whole context of its sequence.

    where: rows of q and out, the sequence of each row, block_tables_BP, context_lens_B. The keys of
    the rows themselves already lie in the cache; pages are read up to the context length only.
    """
    rows, sequences, block_tables_BP, context_lens_B = where
    H, D = q_THD.shape[1], LANE_WIDTH * len(tile[1])
    longest = 0
    for b in sequences:
        longest = max(longest, context_lens_B[b])
    scores_HL = np.empty((H, longest + TOKENS_AT_ONCE - 1), np.float32)
    q_HD, sums_HD = np.empty((H, D), np.float32), np.empty((H, D), np.float32)
    for i in range(rows.size):
        row, b = rows[i], sequences[i]
        length = context_lens_B[b]
        for h in range(H):
            for d in range(D):
                q_HD[h, d] = widen(q_THD[row, h, d]) * scale
                sums_HD[h, d] = ZERO
        _score(tile, q_HD, kv_2NSKD, block_tables_BP[b], length, scores_HL)
        softmax(scores_HL, length)
        _weigh(tile, scores_HL, kv_2NSKD, block_tables_BP[b], length, sums_HD)
        for h in range(H):
            for d in range(D):
                out_THD[row, h, d] = narrow(sums_HD[h, d], out_THD[row, h, d])


@compiled
def softmax(scores_HL: Array, length: Any) -> None:
    """Softmax over the first `length` scores of each row, in place."""
    tops = np.empty(LANE_WIDTH, np.float32)
    for h in range(scores_HL.shape[0]):
        top = _largest(scores_HL, h, length, tops)
        total = ZERO
        for j in range(length):
            weight = exp(scores_HL[h, j] - top)
            scores_HL[h, j] = weight
            total += weight
        inverse = ONE / total
        for j in range(length):
            scores_HL[h, j] *= inverse


@compiled
def _largest(scores_HL: Array, h: Any, length: Any, tops: Array) -> Any:
    """Largest of the first `length` scores of row h, by lanes: a plain loop is not vectorised."""
    full = length // LANE_WIDTH * LANE_WIDTH
    for lane in range(LANE_WIDTH):
        tops[lane] = scores_HL[h, 0]
    for j in range(0, full, LANE_WIDTH):
        for lane in range(LANE_WIDTH):
            tops[lane] = max(tops[lane], scores_HL[h, j + lane])
    top = tops[0]
    for lane in range(LANE_WIDTH):
        top = max(top, tops[lane])
    for j in range(full, length):
        top = max(top, scores_HL[h, j])
    return top


@compiled
def _score(
    tile: Tile, q_HD: Array, kv_2NSKD: Array, table_P: Array, length: Any, scores_HL: Array
) -> None:
    """Scores of all heads, four tokens at a time.

    At the end of a block the last token stands in for those that are missing of four; their
    scores are written over by the next block, or lie behind the end.
    """
    heads, lanes = tile
    D, (_, _, S, K, _), (H, L) = LANE_WIDTH * len(lanes), kv_2NSKD.shape, scores_HL.shape
    q, kv, scores = q_HD.reshape(-1), kv_2NSKD.reshape(-1), scores_HL.reshape(-1)
    last_block, token = (length - 1) // S, K * D
    for p in range(last_block + 1):
        block, following = table_P[p] * S * token, table_P[min(p + 1, last_block)] * S * token
        last = min(S, length - p * S) - 1
        for h in range(0, H, len(heads)):
            q_GD = load(q, h * D, heads, lanes)
            first, ahead, at = block + h * K // H * D, following + h * K // H * D, h * L + p * S
            for s in range(0, last + 1, TOKENS_AT_ONCE):
                s1, s2, s3 = min(s + 1, last), min(s + 2, last), min(s + 3, last)
                for t in (s, s1, s2, s3):
                    prefetch(kv, ahead + t * token, lanes)
                k0_D = load(kv, first + s * token, ONE_HEAD, lanes)
                k1_D = load(kv, first + s1 * token, ONE_HEAD, lanes)
                k2_D = load(kv, first + s2 * token, ONE_HEAD, lanes)
                k3_D = load(kv, first + s3 * token, ONE_HEAD, lanes)
                store_dots(scores, at + s, L, q_GD, (k0_D, k1_D, k2_D, k3_D))


@compiled
def _weigh(
    tile: Tile, scores_HL: Array, kv_2NSKD: Array, table_P: Array, length: Any, sums_HD: Array
) -> None:
    """Add the V of all tokens to the sums of all heads, weighted."""
    heads, lanes = tile
    D, (_, N, S, K, _), (H, L) = LANE_WIDTH * len(lanes), kv_2NSKD.shape, scores_HL.shape
    kv, scores, sums = kv_2NSKD.reshape(-1), scores_HL.reshape(-1), sums_HD.reshape(-1)
    last_block, token = (length - 1) // S, K * D
    for p in range(last_block + 1):
        block, following = N + table_P[p], N + table_P[min(p + 1, last_block)]
        for h in range(0, H, len(heads)):
            sums_GD = load(sums, h * D, heads, lanes)
            head = h * K // H * D
            first, ahead, at = block * S * token + head, following * S * token + head, h * L + p * S
            for s in range(min(S, length - p * S)):
                prefetch(kv, ahead + s * token, lanes)
                v_D = load(kv, first + s * token, ONE_HEAD, lanes)
                sums_GD = add_weighted(sums_GD, v_D, scores, at + s, L)
            store(sums, h * D, sums_GD)
