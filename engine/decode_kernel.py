"""Paged attention of single query tokens on a CPU, compiled by numba.

One sequence at a time: scores of all heads over all blocks, softmax, weighted sum of V. The query
heads that share a key/value head are taken together, so each page is read once from memory. After
PagedAttention (vLLM, SOSP'23, s.4.2); two passes with a score row per head instead of online
softmax, since on a CPU the scores stay in the second-level cache. bfloat16 as uint16 bits.

The head size comes as the length of a tuple, `lanes`, because that makes it a constant of the
compiled code: loops of known length run a quarter faster here. (Constants of a closure would do
the same, but numba compiles closures over other kernels anew in every process.)

Letters: B sequences, T tokens, H query heads, K key/value heads, D head size, N blocks, S slots,
P block-table width, L context length.
"""

from typing import Any

import numpy as np

from engine.kernels import ONE, ZERO, Array, compiled, exp, narrow, widen

LANE_WIDTH = 8
Lanes = tuple[int, ...]


def lanes_of(head_dim: int) -> Lanes:
    """The first argument of the kernel: head_dim / 8 zeros.

    Raises:
        ValueError: head_dim is not a multiple of 8.
    """
    if head_dim % LANE_WIDTH:
        raise ValueError(f"head size {head_dim} is not a multiple of {LANE_WIDTH}")
    return (0,) * (head_dim // LANE_WIDTH)


@compiled
def decode_attention(
    lanes: Lanes,
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
    S, H, D = kv_2NSKD.shape[2], q_THD.shape[1], LANE_WIDTH * len(lanes)
    longest = 0
    for b in sequences:
        longest = max(longest, context_lens_B[b])
    scores_HL = np.empty((H, longest), np.float32)
    q_HD, sums_HD = np.empty((H, D), np.float32), np.empty((H, D), np.float32)
    for i in range(rows.size):
        row, b = rows[i], sequences[i]
        length = context_lens_B[b]
        for h in range(H):
            for d in range(D):
                q_HD[h, d] = widen(q_THD[row, h, d]) * scale
                sums_HD[h, d] = ZERO
        for at in range(0, length, S):
            _score(lanes, q_HD, kv_2NSKD, block_tables_BP[b, at // S], scores_HL, (at, length))
        softmax(scores_HL, length)
        for at in range(0, length, S):
            _weigh(lanes, scores_HL, kv_2NSKD, block_tables_BP[b, at // S], sums_HD, (at, length))
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
    lanes: Lanes, q_HD: Array, kv: Array, block: Any, scores_HL: Array, span: tuple[Any, Any]
) -> None:
    """Scores of one block: four tokens by two heads at a time. span: its first token, length."""
    D, (at, length) = LANE_WIDTH * len(lanes), span
    K = kv.shape[3]
    groups = q_HD.shape[0] // K
    num = min(kv.shape[2], length - at)
    four = num // 4 * 4
    for h in range(K):
        first, last = h * groups, h * groups + groups
        for s in range(0, four, 4):
            i = at + s
            for g in range(first, last - 1, 2):
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
                for d in range(D):
                    a, b = q_HD[g, d], q_HD[g + 1, d]
                    k0, k1 = widen(kv[0, block, s, h, d]), widen(kv[0, block, s + 1, h, d])
                    k2, k3 = widen(kv[0, block, s + 2, h, d]), widen(kv[0, block, s + 3, h, d])
                    a0, a1, a2, a3 = a0 + a * k0, a1 + a * k1, a2 + a * k2, a3 + a * k3
                    b0, b1, b2, b3 = b0 + b * k0, b1 + b * k1, b2 + b * k2, b3 + b * k3
                scores_HL[g, i], scores_HL[g, i + 1] = a0, a1
                scores_HL[g, i + 2], scores_HL[g, i + 3] = a2, a3
                scores_HL[g + 1, i], scores_HL[g + 1, i + 1] = b0, b1
                scores_HL[g + 1, i + 2], scores_HL[g + 1, i + 3] = b2, b3
            if groups % 2:
                a0 = a1 = a2 = a3 = ZERO
                for d in range(D):
                    a = q_HD[last - 1, d]
                    a0 += a * widen(kv[0, block, s, h, d])
                    a1 += a * widen(kv[0, block, s + 1, h, d])
                    a2 += a * widen(kv[0, block, s + 2, h, d])
                    a3 += a * widen(kv[0, block, s + 3, h, d])
                scores_HL[last - 1, i], scores_HL[last - 1, i + 1] = a0, a1
                scores_HL[last - 1, i + 2], scores_HL[last - 1, i + 3] = a2, a3
        for s in range(four, num):
            for g in range(first, last):
                scores_HL[g, at + s] = _dot(q_HD[g], kv[0, block, s, h])


@compiled
def _weigh(
    lanes: Lanes, scores_HL: Array, kv: Array, block: Any, sums_HD: Array, span: tuple[Any, Any]
) -> None:
    """Add one block's V to the sums, weighted. span: its first token, length."""
    D, (at, length) = LANE_WIDTH * len(lanes), span
    K = kv.shape[3]
    groups = sums_HD.shape[0] // K
    num = min(kv.shape[2], length - at)
    four = num // 4 * 4
    for h in range(K):
        first, last = h * groups, h * groups + groups
        for s in range(0, four, 4):
            i = at + s
            for g in range(first, last - 1, 2):
                a0, a1 = scores_HL[g, i], scores_HL[g, i + 1]
                a2, a3 = scores_HL[g, i + 2], scores_HL[g, i + 3]
                b0, b1 = scores_HL[g + 1, i], scores_HL[g + 1, i + 1]
                b2, b3 = scores_HL[g + 1, i + 2], scores_HL[g + 1, i + 3]
                for d in range(D):
                    v0, v1 = widen(kv[1, block, s, h, d]), widen(kv[1, block, s + 1, h, d])
                    v2, v3 = widen(kv[1, block, s + 2, h, d]), widen(kv[1, block, s + 3, h, d])
                    sums_HD[g, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                    sums_HD[g + 1, d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
            if groups % 2:
                a0, a1 = scores_HL[last - 1, i], scores_HL[last - 1, i + 1]
                a2, a3 = scores_HL[last - 1, i + 2], scores_HL[last - 1, i + 3]
                for d in range(D):
                    v0, v1 = widen(kv[1, block, s, h, d]), widen(kv[1, block, s + 1, h, d])
                    v2, v3 = widen(kv[1, block, s + 2, h, d]), widen(kv[1, block, s + 3, h, d])
                    sums_HD[last - 1, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
        for s in range(four, num):
            for g in range(first, last):
                _add(scores_HL[g, at + s], sums_HD[g], kv[1, block, s, h])


@compiled
def _dot(q_D: Array, k_D: Array) -> Any:
    total = ZERO
    for d in range(q_D.size):
        total += q_D[d] * widen(k_D[d])
    return total


@compiled
def _add(weight: Any, sums_D: Array, v_D: Array) -> None:
    for d in range(sums_D.size):
        sums_D[d] += weight * widen(v_D[d])
