"""From the name of a backend to its implementation: the one place that knows all of them.

The in-process double is not here: whoever uses it holds its `MemoryBackend` and passes the
bound `connect` in the place of this module's.
"""

from pathlib import Path

import torch

from core.errors import PeerLost
from kv_transfer import shm, torch_backend
from kv_transfer.backend import BackendKind, Endpoint, Offer, ReceiverBackend, Sender
from kv_transfer.cuda import ipc
from kv_transfer.cuda.card import card_id, reachable_cards
from kv_transfer.nixl import agent as nixl_agent
from kv_transfer.nixl import backend as nixl_backend

INFINIBAND = Path("/sys/class/infiniband")


def local_endpoint(cache_L2NSKD: torch.Tensor) -> Endpoint:
    """What `choose_backend` has to know of this worker."""
    device = cache_L2NSKD.device
    is_on_card = device.type == "cuda"
    return Endpoint(
        host_id=shm.host_id(),
        device=str(device),
        has_nixl=nixl_agent.is_installed(),
        has_rdma=has_rdma(),
        card=card_id(device) if is_on_card else "",
        reachable_cards=reachable_cards(device) if is_on_card else (),
    )


def has_rdma(devices: Path = INFINIBAND) -> bool:
    """True if this host has an InfiniBand or RoCE port that is active."""
    states = devices.glob("*/ports/*/state")
    return any("ACTIVE" in state.read_text(encoding="ascii") for state in states)


def open_backend(kind: BackendKind, *, host: str) -> ReceiverBackend:
    """The decode worker's side of `kind`; `host` is its own address, as peers reach it.

    Raises:
        ConfigError: nixl is asked for and not installed, or does not start.
    """
    if kind is BackendKind.SHM:
        return shm.ShmBackend()
    if kind is BackendKind.IPC:
        return ipc.IpcBackend(host=host)
    if kind is BackendKind.TORCH:
        return torch_backend.TorchBackend(host=host)
    if kind is BackendKind.NIXL:
        return nixl_backend.NixlBackend(host=host)
    raise ValueError(f"{kind} is not made here")


def connect(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> Sender:
    """The prefill worker's end of the link that `offer` describes.

    Raises:
        PeerLost: the decode worker did not answer within `timeout_s`, or it offers a backend
            that this version does not have.
        ConfigError: it offers nixl, which is not installed here.
    """
    if offer.kind == BackendKind.SHM:
        return shm.connect(offer, cache_L2NSKD, timeout_s)
    if offer.kind == BackendKind.IPC:
        return ipc.connect(offer, cache_L2NSKD, timeout_s)
    if offer.kind == BackendKind.TORCH:
        return torch_backend.connect(offer, cache_L2NSKD, timeout_s)
    if offer.kind == BackendKind.NIXL:
        return nixl_backend.connect(offer, cache_L2NSKD, timeout_s)
    raise PeerLost("decode", f"it offers the unknown backend {offer.kind!r}")
