"""How the two ends of a torch link find each other: the spec they share, the group they build.

A pair is a process group object of two ranks on a store prefix of its own. Knows nothing of
pieces; `torch_backend` moves them.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# torch.distributed has these names too, but its type stubs do not export them.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from core.errors import PeerLost
from kv_transfer.backend import BackendKind, Offer

DECODE, PREFILL = 0, 1


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What both ends of a link must agree on; travels as the offer's parameters.

    At most num_slots pieces are under way, those up to slot_bytes long through staging buffers.
    device is that of decode's cache: "cuda" means NCCL.
    """

    host: str
    port: int
    prefix: str
    device: str
    num_slots: int
    slot_bytes: int

    def to_offer(self) -> Offer:
        """The spec as text."""
        names = ("host", "port", "prefix", "device", "num_slots", "slot_bytes")
        return Offer(BackendKind.TORCH, {name: str(getattr(self, name)) for name in names})

    @classmethod
    def of_offer(cls, offer: Offer) -> "LinkSpec":
        """The spec that `to_offer` wrote."""
        texts = offer.parameters
        return cls(
            host=texts["host"],
            port=int(texts["port"]),
            prefix=texts["prefix"],
            device=texts["device"],
            num_slots=int(texts["num_slots"]),
            slot_bytes=int(texts["slot_bytes"]),
        )

    def allocate_slots(self, num_slots: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Staging buffers, touched once: page faults would halve the first pieces' speed."""
        return torch.ones((num_slots, self.slot_bytes), dtype=torch.uint8, device=device).unbind()


def build_pair(spec: LinkSpec, rank: int, build_timeout_s: float) -> Any:
    """One end of a pair over gloo: a ProcessGroupGloo.

    Each end has a store client of its own: a client serves one call at a time, so a link that
    waits for its peer would stop all others.

    Raises:
        PeerLost: the other end was not built within `build_timeout_s`.
    """
    build_timeout = timedelta(seconds=build_timeout_s)
    try:
        client = TCPStore(spec.host, spec.port, is_master=False, timeout=build_timeout)
        store = PrefixStore(spec.prefix, client)
        host = spec.host if rank == DECODE else _address_towards(spec.host, spec.port)
        group = gloo_group(store, rank, host, build_timeout)
    except (RuntimeError, OSError) as error:
        raise PeerLost(spec.prefix, f"no pair was built within {build_timeout_s} s") from error
    return group


def gloo_group(store: Store, rank: int, host: str, build_timeout: timedelta) -> Any:
    """One end of a group over gloo that listens at `host`."""
    # The options that name the address are not in torch's type stubs.
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = build_timeout
    options._threads = 1
    return gloo(store, rank, 2, options)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`: the one the peer can reach."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def forget_keys(store: TCPStore, prefix: str) -> None:
    """Delete what a link left in the store; torch before list_keys keeps some bytes a link."""
    if hasattr(store, "list_keys"):
        for key in store.list_keys():
            if key.startswith(f"{prefix}/"):
                store.delete_key(key)
