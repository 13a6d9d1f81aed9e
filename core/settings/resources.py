"""What one worker takes of a Ray cluster's nodes: the `resources` section of a pool.

Used where workers are placed on nodes (`twophase up`). Knows nothing of Ray.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from core.settings.section import Section

# Names that Ray gives a meaning of its own, and those that say where, not how much.
RESERVED = ("CPU", "GPU", "memory", "object_store_memory", "bundle", "node:")


class Strategy(StrEnum):
    """How the workers of a pool are dealt out to nodes."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_SPREAD = "STRICT_SPREAD"


class ReplicaResources(Section):
    """What one worker reserves of the node it runs on, with `twophase up`."""

    cpus: float | None = Field(default=None, gt=0, le=1024)
    """CPUs; default: the compute threads of all ranks."""
    gpus: int | None = Field(default=None, ge=0, le=64)
    """Cards; default: one for each rank with engine.device cuda, none with cpu."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources that the cluster's nodes were given by name, such as {rdma: 1}."""
    strategy: Strategy = Strategy.PACK
    """PACK: on as few nodes as there is room; SPREAD: on as many as there are; STRICT_SPREAD: never
    two workers of the pool on one node, and those that find none wait for one."""

    @field_validator("custom")
    @classmethod
    def _are_own_names(cls, custom: dict[str, float]) -> dict[str, float]:
        for name in custom:
            if not name or name.startswith(RESERVED):
                raise ValueError(f"{name!r} is not a name of your own: cpus and gpus have keys")
        return custom
