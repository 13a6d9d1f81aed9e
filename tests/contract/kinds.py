"""Every way in which a link can be made here: a backend, how its sender is made, on which devices.

A double does on a CPU what the product does on a card. On cards the suite is the same; where there
are none, or too few, the kinds that need them are skipped with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from kv_transfer.backend import Offer, ReceiverBackend, Sender
from kv_transfer.connection import connect
from kv_transfer.cuda import ipc, nccl
from kv_transfer.cuda.double import SharedMemoryDouble, open_group_double
from kv_transfer.memory import MemoryBackend
from kv_transfer.nixl.agent import INSTALL_HINT, is_installed
from kv_transfer.nixl.backend import NixlBackend
from kv_transfer.shm import ShmBackend
from kv_transfer.torch_backend import TorchBackend

HOST = "127.0.0.1"
SOON_S = 10.0
STAGING = {"slot_bytes": 64 * 1024, "num_slots": 4}


@dataclass(frozen=True)
class Kind:
    """make(take_timeout_s) makes a backend; connect what a peer calls with its offers."""

    make: Callable[[float], ReceiverBackend]
    connect: Callable[[Offer, torch.Tensor, float], Sender] = connect
    source_device: str = "cpu"
    target_device: str = "cpu"


def _torch(take_timeout_s, **changes):
    return TorchBackend(host=HOST, take_timeout_s=take_timeout_s, **STAGING, **changes)


class IpcDouble(ipc.IpcBackend):
    """The product's, into memory that a CPU shares."""

    def __init__(self) -> None:
        self._double = SharedMemoryDouble()
        super().__init__(host=HOST, memory=self._double)

    def close(self) -> None:
        super().close()
        self._double.close()


KINDS = {
    "memory": Kind(lambda _: MemoryBackend(take_timeout_s=0.2)),
    "shm": Kind(lambda _: ShmBackend()),
    "torch": Kind(_torch),
    "nixl": Kind(lambda _: NixlBackend(host=HOST)),
    "nccl-double": Kind(
        partial(_torch, open_group=open_group_double),
        partial(nccl.connect, open_group=open_group_double),
    ),
    "ipc-double": Kind(
        lambda _: IpcDouble(),
        lambda offer, cache, timeout_s: ipc.connect(
            offer, cache, timeout_s, memory=SharedMemoryDouble()
        ),
    ),
    "ipc": Kind(
        lambda _: ipc.IpcBackend(host=HOST), source_device="cuda:0", target_device="cuda:0"
    ),
    "ipc-peer": Kind(
        lambda _: ipc.IpcBackend(host=HOST), source_device="cuda:1", target_device="cuda:0"
    ),
    "nccl": Kind(_torch, source_device="cuda:1", target_device="cuda:0"),
    "nixl-card": Kind(
        lambda _: NixlBackend(host=HOST), source_device="cuda:0", target_device="cuda:0"
    ),
}


def _on_cards(kind, num_cards, also=None):
    num_seen = torch.cuda.device_count()
    lacks = f"needs {num_cards} CUDA cards, torch sees {num_seen}" if num_seen < num_cards else also
    return pytest.param(
        kind, marks=[pytest.mark.gpu, pytest.mark.skipif(bool(lacks), reason=lacks)]
    )


_NO_NIXL = None if is_installed() else INSTALL_HINT

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(_NO_NIXL), reason=INSTALL_HINT))
IPC, IPC_PEER = _on_cards("ipc", 1), _on_cards("ipc-peer", 2)
NCCL = _on_cards("nccl", 2)
NIXL_CARD = _on_cards("nixl-card", 1, _NO_NIXL)


class Named:
    """A backend whose offers name their kind, so that a peer finds the way to connect to them."""

    def __init__(self, name: str, take_timeout_s: float) -> None:
        self._name = name
        self._backend = KINDS[name].make(take_timeout_s)
        self._device = KINDS[name].target_device

    def __getattr__(self, attribute):
        return getattr(self._backend, attribute)

    def __setattr__(self, attribute, value):
        if attribute.startswith("_"):
            object.__setattr__(self, attribute, value)
        else:
            setattr(self._backend, attribute, value)

    def allocate(self, num_bytes):
        """Where the kind wants its target to lie; on a card its owner makes it."""
        if self._device == "cpu":
            return self._backend.allocate(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def offer(self, link_id, cache_L2NSKD):
        """See `ReceiverBackend`."""
        offer, receiver = self._backend.offer(link_id, cache_L2NSKD)
        return replace(offer, kind=f"{self._name}:{offer.kind}"), receiver


def connect_named(offer: Offer, cache: torch.Tensor, timeout_s: float) -> Sender:
    """The sender's end of a `Named` offer, from a copy of `cache` where the kind wants it.

    Other offers are connected to as the product does.
    """
    if ":" not in offer.kind:
        return connect(offer, cache, timeout_s)
    name, _, kind = offer.kind.partition(":")
    found = KINDS[name]
    return found.connect(replace(offer, kind=kind), cache.to(found.source_device), timeout_s)
