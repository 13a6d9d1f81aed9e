"""From the name of a backend to its implementation: the one place that knows all of them.

The in-process double is not here: whoever uses it holds its `MemoryBackend` and passes the
bound `connect` in the place of this module's.
"""

import torch

from core.errors import PeerLost
from kv_transfer import shm, torch_backend
from kv_transfer.backend import BackendKind, Offer, ReceiverBackend, Sender


def open_backend(kind: BackendKind, *, host: str) -> ReceiverBackend:
    """The decode worker's side of `kind`; `host` is its own address, as peers reach it."""
    if kind is BackendKind.SHM:
        return shm.ShmBackend()
    if kind is BackendKind.TORCH:
        return torch_backend.TorchBackend(host=host)
    raise ValueError(f"{kind} is not made here")


def connect(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> Sender:
    """The prefill worker's end of the link that `offer` describes.

    Raises:
        PeerLost: the decode worker did not answer within `timeout_s`, or it offers a backend
            that this version does not have.
    """
    if offer.kind == BackendKind.SHM:
        return shm.connect(offer, cache_L2NSKD, timeout_s)
    if offer.kind == BackendKind.TORCH:
        return torch_backend.connect(offer, cache_L2NSKD, timeout_s)
    raise PeerLost("decode", f"it offers the unknown backend {offer.kind!r}")
