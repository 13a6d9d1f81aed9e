"""The code that records, timed alone: processor time, the fastest of some repeats.

Of calls that do nothing, as with `telemetry.enabled: false`, the same is taken off.
"""

import time
from collections.abc import Callable

from core.clock import MonotonicClock
from core.completion import Completion
from core.events.step import StepFacts
from core.request import FinishReason, Request, RequestId, SamplingParams, Usage, WorkerName
from core.timeline import Phases
from decode_worker.recording import recording_of
from decode_worker.step_log import StepLog
from router.answer import Answer
from router.telemetry.exposition import NoTelemetry, Telemetry
from router.telemetry.history import History
from router.telemetry.measured import Measured

NUM_CALLS, NUM_REPEATS = 300, 15
FAR_S = 1e9


def recording_us(num_sequences: int) -> float:
    """Microseconds for each decode step of so many sequences that its recording takes."""
    return 1e6 * (_step_s(num_sequences, is_on=True) - _step_s(num_sequences, is_on=False))


def _step_s(num_sequences: int, *, is_on: bool) -> float:
    recording, log = recording_of(is_on=is_on, token_bytes=1024), StepLog()
    paces = [recording.pace(0.0) for _ in range(num_sequences)]
    steps = [
        StepFacts(0.02 * i, 0.019, num_sequences, (500 + i) * num_sequences, ())
        for i in range(1, NUM_CALLS + 1)
    ]

    def record() -> None:
        for index, step in enumerate(steps):
            recording.step(log, step)
            for pace in paces:
                pace.token(index, log)

    return fastest_s(record) / NUM_CALLS


def message_us() -> float:
    """Microseconds for each message with tokens that the router's histograms take."""
    return 1e6 * (_message_s(Telemetry()) - _message_s(NoTelemetry()))


def _message_s(telemetry: Telemetry) -> float:
    clock = MonotonicClock()
    request = Request(RequestId("r"), (1,), SamplingParams(max_tokens=1), deadline_s=FAR_S)
    meter = Measured(telemetry).meter(Answer(request, clock.now_s(), 0.0), clock)

    def deliver() -> None:
        for _ in range(NUM_CALLS):
            meter.delivered(1)

    return fastest_s(deliver) / NUM_CALLS


def ending_us() -> float:
    """Microseconds for each answer's end at the router: its histograms, and the history."""
    return 1e6 * (_ending_s(is_on=True) - _ending_s(is_on=False))


def _ending_s(*, is_on: bool) -> float:
    clock = MonotonicClock()
    measured = Measured(Telemetry() if is_on else NoTelemetry())
    history = History(NUM_CALLS if is_on else 0, clock)
    request = Request(RequestId("r"), (1,), SamplingParams(max_tokens=1), deadline_s=FAR_S)
    answer = Answer(request, clock.now_s(), 0.0)
    worker = WorkerName("w")
    completion = Completion(
        request.request_id, FinishReason.LENGTH, Usage(1, 1), Phases(), None, worker, worker, "", 0
    )

    def end() -> None:
        for _ in range(NUM_CALLS):
            measured.finished((completion,))
            measured.left((answer,))
            history.add(completion, answer.record)

    return fastest_s(end) / NUM_CALLS


def fastest_s(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest of some calls."""
    seconds = []
    for _ in range(NUM_REPEATS):
        began_s = time.thread_time()  # which others on the core do not lengthen
        call()
        seconds.append(time.thread_time() - began_s)
    return min(seconds)
