"""What a prefill worker counts of its steps since it began, for /metrics."""

from core import telemetry
from core.tally import Tally
from core.worker import Role


class StepCounts:
    """Steps, and the prompt tokens that they computed."""

    def __init__(self, tally: Tally) -> None:
        self._steps_s = tally.distribution(telemetry.STEP, "prefill")
        self._num_tokens = tally.total(telemetry.WORKER_PROMPT_TOKENS, Role.PREFILL)

    def step(self, num_tokens: int, compute_s: float) -> None:
        """A step ended."""
        self._steps_s.observe(compute_s)
        self._num_tokens.value += num_tokens
