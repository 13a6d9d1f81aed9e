"""Where a runner's tensors lie, and what a step needs there beside plain torch.

`Device` is the seam between the runner, which is the same everywhere, and a card: how the arrays
of a step get there, which stream computes, when a layer's KV is written (`written`), how much
memory is free, and graphs. `host` is a CPU, `cuda` a card, `double` the card's double on a CPU.
`open_device` is the door.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.errors import ConfigError
from engine.device.host import HostDevice
from engine.device.interface import Device, Graph, GraphMaker

__all__ = ["Device", "Graph", "GraphMaker", "HostDevice", "fitting", "open_device"]


def open_device(name: str) -> Device:
    """The device of that name, as torch writes it: cpu, cuda:0.

    Raises:
        ConfigError: this process sees no such device.
    """
    if name == "cpu":
        return HostDevice()
    from engine.device.cuda import CudaDevice

    return CudaDevice(torch.device(name))


@contextmanager
def fitting(what: str, path: str) -> Iterator[None]:
    """Turn running out of the card's memory into a ConfigError about `path`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(path, f"{what} does not fit into the card's memory: {first}") from error
