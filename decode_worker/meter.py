"""What this worker measures of its own work for those who scale pools.

Pure: facts and times in, `Signals` out; `worker` notes each where it happens.
"""

from core.signals import Signals, Window


class DecodeMeter:
    """Waits for blocks and for slots, and steps, of the last seconds."""

    def __init__(self) -> None:
        self._waits_s = Window()
        self._steps_s = Window()

    def waited(self, wait_s: float, now_s: float) -> None:
        """A request got its blocks, or its slot, after `wait_s`."""
        self._waits_s.note(wait_s, now_s)

    def step(self, compute_s: float, now_s: float) -> None:
        """A step took `compute_s`."""
        self._steps_s.note(compute_s, now_s)

    def signals(self, now_s: float, *, oldest_wait_s: float) -> Signals:
        """All of it; oldest_wait_s is that of the request that waits longest for blocks."""
        return Signals(
            queue_wait_p50_s=self._waits_s.quantile(0.5, now_s),
            queue_wait_p95_s=self._waits_s.quantile(0.95, now_s),
            oldest_wait_s=oldest_wait_s,
            step_s=self._steps_s.mean(now_s),
        )
