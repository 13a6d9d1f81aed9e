"""What this router's requests took and gave, as metrics, observed where it happens.

While an answer runs that is one observation for each hand-over of tokens; all else is told by its
Completion, once. Runs in the router's event loop.
"""

import asyncio
from collections.abc import Sequence

from core import telemetry
from core.clock import Clock
from core.completion import Completion
from core.errors import word_of
from core.timeline import Phases
from router.answer import Answer
from router.telemetry.exposition import Telemetry


class Measured:
    """The measured metrics of one router; one per process."""

    def __init__(self, telemetry_: Telemetry | None = None) -> None:
        made = self.telemetry = telemetry_ or Telemetry()
        self._ttft = made.histogram(telemetry.TIME_TO_FIRST_TOKEN)
        self._itl = made.histogram(telemetry.INTER_TOKEN_LATENCY)
        self._request = made.histogram(telemetry.REQUEST_DURATION)
        waits, phases = made.histogram(telemetry.QUEUE_WAIT), made.histogram(telemetry.PHASE)
        # Looked up once: an answer's end costs as much as some tens of its tokens otherwise.
        self._router_wait = waits.labels("router")
        self._waits = [waits.labels(phase) for phase in ("prefill", "decode")]
        self._phases = [phases.labels(name) for name, _ in Phases().items()]
        self._unaccounted = phases.labels("unaccounted")
        self._prefill = made.histogram(telemetry.PREFILL)
        self._transfer = made.histogram(telemetry.KV_TRANSFER)
        self._exposed = made.histogram(telemetry.KV_TRANSFER_EXPOSED)
        self._transfer_bytes = made.counter(telemetry.KV_TRANSFER_BYTES)
        self._requests = made.counter(telemetry.REQUESTS)
        self._prompt_tokens = made.counter(telemetry.PROMPT_TOKENS)
        self._output_tokens = made.counter(telemetry.OUTPUT_TOKENS)
        self._failed_attempts = made.counter(telemetry.FAILED_ATTEMPTS)

    def finished(self, completions: Sequence[Completion]) -> None:
        """A request ended well; its answers by index."""
        self._requests.labels(completions[0].finish_reason).inc()
        # The others wait for the first one's prompt, not for workers.
        self._router_wait.observe(completions[0].phases.place_s)
        for completion in completions:
            self._completed(completion)

    def failed(self, error: BaseException) -> None:
        """A request ended with an error: its own, or that its client went away."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        self._requests.labels("cancelled" if is_cancelled else word_of(error)).inc()

    def left(self, answers: Sequence[Answer]) -> None:
        """A request is over, however it ended: what was read for it, and what was sent."""
        if answers and answers[0].num_attempts > 0:
            self._prompt_tokens.inc(answers[0].request.num_prompt_tokens)
        self._output_tokens.inc(sum(answer.num_sent_tokens for answer in answers))

    def _completed(self, completion: Completion) -> None:
        phases, transfer = completion.phases, completion.transfer
        self._request.observe(phases.total_s)
        waits = (phases.queue_s, phases.slot_wait_s)
        for wait, seconds in zip(self._waits, waits, strict=True):
            wait.observe(seconds)
        for phase, (_, seconds) in zip(self._phases, phases.items(), strict=True):
            phase.observe(seconds)
        # Phases of two processes may overlap by a hop; a sum that falls would be read as a restart.
        self._unaccounted.observe(max(phases.unaccounted_s, 0.0))
        length = telemetry.input_length(completion.usage.num_prompt_tokens)
        self._prefill.labels(length).observe(phases.prefill_s)
        self._failed_attempts.inc(len(completion.failures))
        if transfer is not None:
            self._transfer.labels(transfer.backend).observe(transfer.push_s)
            self._exposed.labels(transfer.backend).observe(transfer.exposed_s)
            self._transfer_bytes.labels(transfer.backend).inc(transfer.num_bytes)

    def meter(self, received_s: float, clock: Clock) -> "AnswerMeter":
        """A meter for one answer of a request that came at `received_s`."""
        return AnswerMeter(self, received_s, clock)

    def first_tokens(self, seconds: float) -> None:
        """An answer's first tokens were handed to the transport, so long after its request."""
        self._ttft.observe(seconds)

    def more_tokens(self, seconds: float) -> None:
        """Tokens were handed to the transport, so long after those before."""
        self._itl.observe(seconds)


class AnswerMeter:
    """Watches one answer's tokens go out."""

    def __init__(self, measured: Measured, received_s: float, clock: Clock) -> None:
        self._measured = measured
        self._clock = clock
        self._last_s = received_s
        self._tell = measured.first_tokens

    def delivered(self) -> None:
        """Some tokens were handed to the transport just now."""
        now_s = self._clock.now_s()
        self._tell(now_s - self._last_s)
        self._last_s, self._tell = now_s, self._measured.more_tokens
