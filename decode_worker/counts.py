"""What a decode worker counts of its steps since it began, for /metrics.

Runs in the event loop, between two steps: some microseconds for each, whatever its size.
"""

from bisect import bisect_left

from core import telemetry
from core.tally import Distribution, Tally
from core.telemetry import BATCHES, HISTORIES, size_label
from core.worker import Role
from decode_worker.step_log import StepFacts


class StepCounts:
    """Steps by kind and size, and the KV cache that they read."""

    def __init__(self, token_bytes: int) -> None:
        tally = self.tally = Tally()
        self._token_bytes = token_bytes
        self._num_prompt = tally.total(telemetry.WORKER_PROMPT_TOKENS, Role.DECODE)
        self._num_output = tally.total(telemetry.WORKER_OUTPUT_TOKENS)
        self._kv_read = tally.distribution(telemetry.DECODE_KV_READ)
        self._prefill, self._decode, self._mixed = (
            tally.distribution(telemetry.STEP, kind) for kind in ("prefill", "decode", "mixed")
        )
        self._by_size: dict[tuple[int, int], Distribution] = {}

    def step(self, step: StepFacts) -> None:
        """A step ended."""
        if step.num_sequences:
            self._num_output.value += step.num_sequences
            self._kv_read.observe(step.num_history_tokens * self._token_bytes)
        if step.prompts:
            self._num_prompt.value += sum(num_tokens for _, num_tokens in step.prompts)
            (self._mixed if step.num_sequences else self._prefill).observe(step.step_s)
        else:
            self._decode.observe(step.step_s)
            self._of_size(step).observe(step.step_s)

    def _of_size(self, step: StepFacts) -> Distribution:
        batch = bisect_left(BATCHES, step.num_sequences)
        history = bisect_left(HISTORIES, step.num_history_tokens)
        known = self._by_size.get((batch, history))
        if known is None:
            labels = size_label(BATCHES, batch), size_label(HISTORIES, history)
            known = self.tally.distribution(telemetry.DECODE_STEP, *labels)
            self._by_size[batch, history] = known
        return known
