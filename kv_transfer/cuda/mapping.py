"""Hands the memory of a card to another process of the host, as text, without pickle.

torch shares a CUDA storage as bytes and numbers (`torch/multiprocessing/reductions.py`, torch
2.13): the handle of the driver's allocation, the storage's place in it, and a counter in shared
memory. They travel in the offer of a link. torch's event is not used: what decode has started on
its cache before it was asked for a link is done.

The counter tells torch that others still map the storage, so that it keeps the memory when its
owner lets go of it. Each storage is shared once and each mapping counts down, so with several links
the count says nothing; it does not have to, since the cache lives as long as its process.
"""

from typing import Protocol, cast

import torch

from core.errors import PeerLost
from kv_transfer.cuda.card import card_id, local_card

_NO_EVENT = bytes(64)


class Memory(Protocol):
    """How storage is handed over; the double does it with a CPU's shared memory."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Flat uint8, zeroed, that can be exported."""
        ...

    def export(self, cache: torch.Tensor) -> dict[str, str]:
        """What `map` needs of the storage that the cache lies in."""
        ...

    def map(self, parameters: dict[str, str]) -> torch.Tensor:
        """The exported storage, whole, as flat uint8; it is unmapped with its last tensor.

        Raises:
            PeerLost: it cannot be reached from here.
        """
        ...


class CudaMemory:
    """The memory of cards, by CUDA IPC."""

    def __init__(self) -> None:
        self._exported: dict[int, dict[str, str]] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Memory`; on the current card."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def export(self, cache: torch.Tensor) -> dict[str, str]:
        """See `Memory`; each storage is shared once."""
        storage = cache.untyped_storage()
        found = self._exported.get(storage.data_ptr())
        if found is None:
            shared = cast(tuple[int, bytes, int, int, bytes, int, bytes, bool], _share(storage))
            _, handle, num_bytes, offset, counter, counter_offset, _, _ = shared
            found = self._exported[storage.data_ptr()] = {
                "card": card_id(cache.device),
                "handle": handle.hex(),
                "storage_bytes": str(num_bytes),
                "storage_offset": str(offset),
                "counter": counter.hex(),
                "counter_offset": str(counter_offset),
            }
        return found

    def map(self, parameters: dict[str, str]) -> torch.Tensor:
        """See `Memory`."""
        device = local_card(parameters["card"])
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index,
                bytes.fromhex(parameters["handle"]),
                int(parameters["storage_bytes"]),
                int(parameters["storage_offset"]),
                bytes.fromhex(parameters["counter"]),
                int(parameters["counter_offset"]),
                _NO_EVENT,
                False,  # without an event
            )
        except RuntimeError as error:
            why = str(error).split("\n", maxsplit=1)[0]
            raise PeerLost("decode", f"its card's memory cannot be mapped: {why}") from error
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _share(storage: torch.UntypedStorage) -> object:
    return storage._share_cuda_()  # type: ignore[no-untyped-call]
