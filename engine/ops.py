"""The small operations between the matrix products of a layer, fused on a CPU, plain elsewhere.

Two implementations of one protocol, chosen once by `select_ops`: numba kernels for CPU tensors,
and plain torch, which is their twin in the parity tests and the way on every other device.
The residual stream is float32 whatever the model's format. Letters: T tokens, M model width,
X = H + 2K heads of q, k and v, D head size, P positions, F feed-forward width, N blocks, S slots.
"""

from typing import Any, Protocol  # numpy arrays of any format

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Batch


class Ops(Protocol):
    """What a layer does between two matrix products."""

    def add_rms_norm(
        self, delta_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to residual in place; the normed residual in the format of delta."""
        ...

    def head_rms_norm(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> None:
        """Norm each head by itself, in place."""
        ...

    def rotate_and_write(
        self, qkv_TXD: torch.Tensor, angles_P2C: torch.Tensor, batch: Batch, kv_2NSKD: torch.Tensor
    ) -> None:
        """Rotate q and k in place, then put k and v into the batch's slots of the cache.

        angles holds cosine and sine per position, for C = D / 2 frequencies, float32.
        """
        ...

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """Product of silu(first half) and second half."""
        ...


class TorchOps:
    """Plain torch on any device."""

    def add_rms_norm(
        self, delta_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops`."""
        residual_TM += delta_TM
        return F.rms_norm(residual_TM, weight_M.shape, weight_M, eps).to(delta_TM.dtype)

    def head_rms_norm(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> None:
        """See `Ops`."""
        x_THD.copy_(F.rms_norm(x_THD.float(), weight_D.shape, weight_D, eps))

    def rotate_and_write(
        self, qkv_TXD: torch.Tensor, angles_P2C: torch.Tensor, batch: Batch, kv_2NSKD: torch.Tensor
    ) -> None:
        """See `Ops`."""
        num_kv = kv_2NSKD.shape[3]
        angles_T2C = angles_P2C[batch.positions_T]
        cosine, sine = angles_T2C[:, None, 0], angles_T2C[:, None, 1]
        rotated = qkv_TXD[:, :-num_kv]
        low, high = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1))
        slots = kv_2NSKD.flatten(1, 2)
        slots[0, batch.slot_mapping_T] = qkv_TXD[:, -2 * num_kv : -num_kv]
        slots[1, batch.slot_mapping_T] = qkv_TXD[:, -num_kv:]

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return F.silu(gate) * up


class NumbaOps:
    """Fused kernels on CPU tensors of float32 or bfloat16, without the GIL."""

    def __init__(self) -> None:
        """Load the kernels; they compile on their first call.

        Raises:
            ImportError: numba is not there.
            RuntimeError: numba finds no place for its compiled code.
        """
        from engine import kernels

        self._kernels = kernels

    def add_rms_norm(
        self, delta_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops`."""
        out_TM = torch.empty_like(delta_TM)
        self._kernels.add_rms_norm(
            bits(delta_TM), residual_TM.numpy(), weight_M.numpy(), np.float32(eps), bits(out_TM)
        )
        return out_TM

    def head_rms_norm(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> None:
        """See `Ops`."""
        self._kernels.head_rms_norm(bits(x_THD), weight_D.numpy(), np.float32(eps))

    def rotate_and_write(
        self, qkv_TXD: torch.Tensor, angles_P2C: torch.Tensor, batch: Batch, kv_2NSKD: torch.Tensor
    ) -> None:
        """See `Ops`."""
        self._kernels.rotate_and_write(
            bits(qkv_TXD),
            angles_P2C.numpy(),
            batch.positions_T.numpy(),
            batch.slot_mapping_T.numpy(),
            bits(kv_2NSKD),
        )

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        num_tokens, width = gate_up_TF.shape
        out_TF = gate_up_TF.new_empty(num_tokens, width // 2)
        self._kernels.silu_mul(bits(gate_up_TF), bits(out_TF))
        return out_TF


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory as a numpy array: float32, or the uint16 bits of bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def select_ops(device: torch.device) -> Ops:
    """Fused kernels on a CPU where numba works, plain torch elsewhere."""
    if device.type != "cpu":
        return TorchOps()
    try:
        return NumbaOps()
    except (ImportError, RuntimeError):
        return TorchOps()
