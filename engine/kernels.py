"""Fused elementwise CPU kernels of one decoder layer, compiled by numba.

On a CPU the small operations between the matrix products cost as much as the products of a decode
step when each is its own pass; here each group is one pass over memory. Plain twins are in
`engine.ops`, which picks between the two. bfloat16 arrays come as their uint16 bits: widening is a
shift, narrowing rounds to nearest even. Kernels hold no GIL and run on the calling thread.
Letters: T tokens, M model width, H query heads, K key/value heads, D head size, N blocks, S slots.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast  # numba has no types

import numba
import numpy as np
from numba import types
from numba.extending import overload

Function = TypeVar("Function", bound=Callable[..., Any])
Array = np.ndarray

ROUND_BIAS = np.uint32(0x7FFF)
EXP_MAX, EXP_MIN = np.float32(88.0), np.float32(-87.0)
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
HALF, ONE, ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


def compiled(function: Function) -> Function:
    """`function` compiled on its first call and kept on disk, free of the GIL."""
    compile_ = numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    return cast(Function, compile_(function))


def inlined(function: Function) -> Function:
    """`function` compiled into its callers."""
    return cast(Function, numba.njit(inline="always", fastmath=True, error_model="numpy")(function))


def widen(value: Any) -> Any:
    """A float32, from a float32 or from the bits of a bfloat16."""


def narrow(value: Any, like: Any) -> Any:
    """The float32 `value` in the format of `like`: float32, or the bits of a bfloat16."""


def _widen(value: Any) -> Callable[..., Any]:
    def keep(value: Any) -> Any:
        return value

    def widen_bfloat16(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    return keep if isinstance(value, types.Float) else widen_bfloat16


def _narrow(value: Any, like: Any) -> Callable[..., Any]:
    def keep(value: Any, like: Any) -> Any:
        return value

    def round_to_bfloat16(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + ROUND_BIAS + odd) >> np.uint32(16))

    return keep if isinstance(like, types.Float) else round_to_bfloat16


overload(widen, inline="always")(_widen)
overload(narrow, inline="always")(_narrow)


@inlined
def exp(x: Any) -> Any:
    """e**x in float32 to about 2e-7, without a call, so that loops over it vectorise.

    Range reduction and polynomial as in Cephes' expf (Moshier); clamped to [-87, 88].
    """
    x = max(min(x, EXP_MAX), EXP_MIN)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + ONE
    exponent = np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return p * exponent.view(np.float32)


@compiled
def add_rms_norm(
    delta_TM: Array, residual_TM: Array, weight_M: Array, eps: np.float32, out_TM: Array
) -> None:
    """Add delta to residual in place; out is residual / rms(residual) * weight, both float32."""
    width = residual_TM.shape[1]
    for t in range(residual_TM.shape[0]):
        squares = ZERO
        for i in range(width):
            x = residual_TM[t, i] + widen(delta_TM[t, i])
            residual_TM[t, i] = x
            squares += x * x
        inverse = ONE / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            out_TM[t, i] = narrow(residual_TM[t, i] * inverse * weight_M[i], out_TM[t, i])


@compiled
def head_rms_norm(x_THD: Array, weight_D: Array, eps: np.float32) -> None:
    """Each head of each token divided by its rms, times weight, in place (Qwen3's q/k norm)."""
    num_heads, size = x_THD.shape[1], x_THD.shape[2]
    for t in range(x_THD.shape[0]):
        for h in range(num_heads):
            squares = ZERO
            for d in range(size):
                x = widen(x_THD[t, h, d])
                squares += x * x
            inverse = ONE / np.sqrt(squares / np.float32(size) + eps)
            for d in range(size):
                x = widen(x_THD[t, h, d]) * inverse * weight_D[d]
                x_THD[t, h, d] = narrow(x, x_THD[t, h, d])


@compiled
def rotate_and_write(
    qkv_TXD: Array, angles_P2C: Array, positions_T: Array, slots_T: Array, kv_2NSKD: Array
) -> None:
    """Rotary embedding of q and k in place, then k and v into their slots of the cache.

    qkv holds X = H + 2K heads per token: queries, keys, values. angles holds cosine and sine of
    C = D / 2 frequencies per position, half-split form (RoFormer, Su et al. 2021).
    """
    block_size, num_kv = kv_2NSKD.shape[2], kv_2NSKD.shape[3]
    half = angles_P2C.shape[2]
    num_heads = qkv_TXD.shape[1] - 2 * num_kv
    for t in range(qkv_TXD.shape[0]):
        position = positions_T[t]
        for h in range(num_heads + num_kv):
            for c in range(half):
                cosine, sine = angles_P2C[position, 0, c], angles_P2C[position, 1, c]
                low, high = widen(qkv_TXD[t, h, c]), widen(qkv_TXD[t, h, c + half])
                qkv_TXD[t, h, c] = narrow(low * cosine - high * sine, qkv_TXD[t, h, c])
                qkv_TXD[t, h, c + half] = narrow(high * cosine + low * sine, qkv_TXD[t, h, c])
        block, slot = slots_T[t] // block_size, slots_T[t] % block_size
        for h in range(num_kv):
            for d in range(2 * half):
                kv_2NSKD[0, block, slot, h, d] = qkv_TXD[t, num_heads + h, d]
                kv_2NSKD[1, block, slot, h, d] = qkv_TXD[t, num_heads + num_kv + h, d]


@compiled
def silu_mul(gate_up_TF: Array, out_TF: Array) -> None:
    """silu(gate) * up, where gate_up holds gate in its first half and up in its second."""
    width = out_TF.shape[1]
    for t in range(out_TF.shape[0]):
        for i in range(width):
            gate = widen(gate_up_TF[t, i])
            up = widen(gate_up_TF[t, i + width])
            out_TF[t, i] = narrow(gate / (ONE + exp(-gate)) * up, out_TF[t, i])
