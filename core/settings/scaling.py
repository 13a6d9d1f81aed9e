"""How pools may scale: the `scaling` section of the YAML. docs/scaling.md tells the rules.

Without the section pools keep their `replicas`; with it those are where they begin. Knows nothing
of workers.
"""

import math
from pathlib import Path
from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from core.errors import ConfigError
from core.settings.section import Seconds, Section

Replicas = Annotated[int, Field(ge=0, le=1024)]


class PoolScaling(Section):
    """How far one pool may scale, and what it is to keep."""

    min_replicas: Replicas = 1
    """Fewest workers; 0, then of both pools, lets an idle cluster go to nothing."""
    max_replicas: Replicas = 4
    """Most workers."""
    target_wait_s: Seconds = 0.5
    """Mean wait of a request for this phase that the pool is sized for."""
    cost: float = Field(default=1.0, gt=0, le=1024)
    """What one worker takes of `scaling.budget`: cards, say, or cores."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(
                f"max_replicas is {self.max_replicas}, less than {max(self.min_replicas, 1)}"
            )
        return self


class DecodeScaling(PoolScaling):
    """Of the pool that makes tokens."""

    target_step_s: Seconds = 0.1
    """Longest mean decode step, which is the gap between two tokens of a stream."""
    max_kv_use: float = Field(default=0.9, gt=0, le=1)
    """Share of the KV blocks in use that the pool is sized for."""


class ScalingConfig(Section):
    """When pools grow and shrink."""

    prefill: PoolScaling | None = None
    """The pool that reads prompts; in mode disaggregated, and only there."""
    decode: DecodeScaling = DecodeScaling()
    target_transfer_wait_s: Seconds = 0.25
    """Longest wait of KV bytes for a link; while it is longer, and the link busy, no pool grows."""
    min_ratio: float = Field(default=0.0, ge=0)
    """Fewest prefill workers for each decode worker."""
    max_ratio: float = Field(default=1024.0, gt=0)
    """Most prefill workers for each decode worker."""
    budget: float | None = Field(default=None, gt=0)
    """Most that all workers may cost together, those that are draining included."""
    role_change: bool = True
    """Whether a drained worker may start again in the other pool."""
    interval_s: Seconds = 5.0
    """Time between two decisions."""
    grow_after_s: float = Field(default=10.0, ge=0, le=3600)
    """A pool grows to the least that was needed at any moment of this span."""
    shrink_after_s: float = Field(default=300.0, ge=0, le=86_400)
    """A pool shrinks to the most that was needed at any moment of this span, or of a longer one
    that it learned."""
    max_shrink_after_s: float = Field(default=3600.0, ge=0, le=86_400)
    """Requests that wait for workers which left less than this ago teach the pool to keep workers
    for longer, at most for this. 0: nothing is learned."""
    cooldown_s: float = Field(default=60.0, ge=0, le=86_400)
    """After a change of a pool, none in the other direction for this long; and no more workers
    leave a pool in use, in decode two mean answers longer."""
    hysteresis: float = Field(default=0.15, ge=0, le=1)
    """Where the budget is spent, a worker changes pools only if that helps by this share; and
    a pool shrinks no further than to what so much more load would need."""
    catch_up_s: Seconds = 30.0
    """A backlog is to be worked off within this time."""
    stale_after_s: Seconds = 10.0
    """What a worker said longer ago is not known any more."""
    start_timeout_s: Seconds = 300.0
    """A worker that has not come up within this time is given up."""
    idle_s: Seconds = 600.0
    """With min_replicas 0: how long nobody asks anything before all workers stop."""
    ask_for_nodes: bool = False
    """With `twophase up`: whether Ray's own autoscaler is asked for the nodes that the workers
    take. Only for Ray clusters that have one; it then follows what is decided here."""
    dry_run: bool = False
    """Decide and say so, but change nothing."""
    log: Path | None = None
    """File to which each decision is appended as a line of JSON, for `twophase scaling`."""
    log_size: ByteSize = Field(default=ByteSize(16 << 20), ge=4096)
    """At this size `log` becomes LOG.1, in place of an older one, and another begins."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if self.shrink_after_s < self.grow_after_s:
            raise ValueError(
                f"shrink_after_s is {self.shrink_after_s:g}, less than grow_after_s, which is "
                f"{self.grow_after_s:g}: pools would go up and down"
            )
        if self.shrink_after_s < 2 * self.interval_s:
            raise ValueError(
                f"shrink_after_s is {self.shrink_after_s:g}, less than two intervals of "
                f"{self.interval_s:g}: one look would decide"
            )
        return self

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        prefill = self.prefill
        if prefill is None:
            if self.min_ratio:
                raise ValueError("min_ratio has no effect without a prefill pool: take it out")
        elif (prefill.min_replicas == 0) != (self.decode.min_replicas == 0):
            raise ValueError("min_replicas is 0 for one pool: neither is of use without the other")
        least = self._least_cost()
        if least is None:
            raise ValueError(
                f"no numbers of workers within the bounds have {self.min_ratio:g} to "
                f"{self.max_ratio:g} prefill workers for each decode worker"
            )
        if self.budget is not None and least > self.budget:
            raise ValueError(f"budget is {self.budget:g}, and the fewest workers cost {least:g}")
        return self

    def refuse_start(self, num_prefill: int | None, num_decode: int) -> None:
        """Refuse numbers to begin with that are not allowed; None: there is no prefill pool.

        Raises:
            ConfigError: with the key that does not fit.
        """
        if (self.prefill is None) != (num_prefill is None):
            problem = (
                "is missing: there is a prefill pool"
                if self.prefill is None
                else ("has no effect where decode workers read the prompts: take it out")
            )
            raise ConfigError("scaling.prefill", problem)
        _refuse_outside("decode", num_decode, self.decode)
        if self.prefill is not None and num_prefill is not None:
            _refuse_outside("prefill", num_prefill, self.prefill)
        if (num_prefill or 0) not in self.prefill_range(num_decode):
            problem = f"is {num_prefill} to {num_decode} decode workers, outside scaling's ratio"
            raise ConfigError("prefill.replicas", problem)
        cost = self.cost(num_prefill or 0, num_decode)
        if self.budget is not None and cost > self.budget:
            raise ConfigError("scaling.budget", f"is {self.budget:g}, and `replicas` cost {cost:g}")

    def prefill_range(self, num_decode: int) -> range:
        """Numbers of prefill workers that bounds and ratio allow beside `num_decode`."""
        if self.prefill is None:
            return range(1)
        if num_decode == 0:
            return range(1) if self.prefill.min_replicas == 0 else range(0)
        least = max(self.prefill.min_replicas, 1, math.ceil(self.min_ratio * num_decode))
        most = min(self.prefill.max_replicas, math.floor(self.max_ratio * num_decode))
        return range(least, most + 1)

    def cost(self, num_prefill: int, num_decode: int) -> float:
        """What so many workers take of the budget."""
        prefill_cost = self.prefill.cost if self.prefill is not None else 0.0
        return num_prefill * prefill_cost + num_decode * self.decode.cost

    def _least_cost(self) -> float | None:
        costs = []
        for num_decode in range(max(self.decode.min_replicas, 1), self.decode.max_replicas + 1):
            allowed = self.prefill_range(num_decode)
            if allowed:
                costs.append(self.cost(allowed[0], num_decode))
        return min(costs, default=None)


def _refuse_outside(name: str, number: int, bounds: PoolScaling) -> None:
    least, most = bounds.min_replicas, bounds.max_replicas
    if not least <= number <= most:
        raise ConfigError(
            f"{name}.replicas", f"is {number}, and scaling.{name} allows {least} to {most}"
        )
