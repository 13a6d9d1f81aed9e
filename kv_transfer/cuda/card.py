"""Which card a cache lies on, and which cards a process can write to from there.

A card is named by its uuid, since processes count cards differently, and by the namespace of
interprocess communication, outside of which its memory cannot be handed over.
"""

import os

import torch

from core.errors import PeerLost


def card_id(device: torch.device) -> str:
    """Equal for two caches exactly if they lie on one card and could be mapped by each other."""
    return f"{_uuid(device.index)}/ipc:{os.stat('/proc/self/ns/ipc').st_ino}"


def reachable_cards(device: torch.device) -> tuple[str, ...]:
    """Every card that this process sees and `device` has peer access to, itself included."""
    return tuple(
        card_id(torch.device("cuda", other))
        for other in range(torch.cuda.device_count())
        if other == device.index or torch.cuda.can_device_access_peer(device.index, other)
    )


def local_card(wanted: str) -> torch.device:
    """The card of that id, as this process counts.

    Raises:
        PeerLost: this process does not see it.
    """
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if card_id(device) == wanted:
            return device
    raise PeerLost("decode", f"its cache lies on card {wanted}, which this process does not see")


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
