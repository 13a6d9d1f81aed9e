"""The `chaos` section of the YAML: faults to order, for a cluster that nobody depends on.

`twophase chaos` kills and pauses processes by it; in a cluster with it enabled, prefill workers
make their links bad, and child processes have clocks that differ. Off unless `enabled`; settings
that then have no effect are refused.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from core.settings.section import Section


class FaultKind(StrEnum):
    """What is done to the process of a worker or a router."""

    KILL = "kill"
    PAUSE = "pause"
    MEMORY = "memory"


class ChaosConfig(Section):
    """Which faults, how often, and the load beside them."""

    enabled: bool = False
    """Whether faults may be injected at all."""
    duration_s: float = Field(default=60.0, gt=0, le=86_400)
    """How long faults and load go on."""
    every_s: float = Field(default=5.0, gt=0, le=3_600)
    """From one fault to the next."""
    faults: tuple[FaultKind, ...] = Field(default=(FaultKind.KILL, FaultKind.PAUSE), min_length=1)
    """kill (SIGKILL), pause (SIGSTOP, then SIGCONT) and memory (nearly no more of it can be had, by
    RLIMIT_AS); each time one of these is drawn."""
    pause_s: float = Field(default=2.0, gt=0, le=3_600)
    """How long a paused process stands still, or gets no memory."""
    routers: int = Field(default=2, ge=1, le=16)
    """Of the run. With several, they are hit too, and a client goes on at the next one."""
    streams: int = Field(default=8, ge=1, le=1024)
    """Requests that run at the same time."""
    max_tokens: int = Field(default=96, ge=8)
    """Length of each answer, where nothing else ends it."""
    lost_pieces: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the pieces of KV cache that senders do not send, though they say so."""
    piece_delay_s: float = Field(default=0.0, ge=0, le=60)
    """How long a sender waits before each piece."""
    clock_skew_s: int = Field(default=0, ge=0, le=10**8)
    """Each child process has a monotonic clock of its own, up to so many seconds ahead of the
    machine's (time namespaces: Linux, as root)."""
    link_bytes_per_s: float | None = Field(default=None, ge=1_000)
    """Most that a worker sends over each of its links; default: what the link carries."""
    seed: int = 1
    """Of the draws: which fault, who is hit, which pieces, which clock is how far ahead."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if getattr(self, name) != field.default]
        if changed and not self.enabled:
            raise ValueError(f"{changed[0]} has no effect without enabled: true")
        return self

    @property
    def is_link_bad(self) -> bool:
        """Whether pieces are lost or late."""
        is_slow = self.piece_delay_s > 0 or self.link_bytes_per_s is not None
        return self.lost_pieces > 0 or is_slow
