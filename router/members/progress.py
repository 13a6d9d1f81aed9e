"""Whether a worker that answers also works.

A worker whose device hangs still answers: its event loop runs, its steps do not. Each status tells
how many steps were done and how many requests wait for the next one alone; a worker is wedged when
the first number stands still while the second is not zero.

Pure: statuses and times in, a duration out.
"""

from core.worker import WorkerStatus


class StepWatch:
    """Watches the steps of one worker."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._since_s = 0.0

    def stalled_s(self, status: WorkerStatus, now_s: float) -> float:
        """How long no step was done although work waited, up to this status."""
        if status.num_runnable_requests == 0 or status.num_steps != self._num_steps:
            self._num_steps = status.num_steps
            self._since_s = now_s
        return now_s - self._since_s
