"""What telemetry costs decode: what is recorded for each step and message, on against off.

    python -m bench.telemetry [MODEL] [--pairs N] [--streams N]

A decode worker steps some streams side by side as fast as it can: scheduler, engine, bookkeeping
and the messages' metrics at the router, as in servers, without their sockets. What is recorded is
switched between steps. Two neighbouring steps are a pair, one with telemetry and one without, in an
order that is drawn, so that what the machine does by itself within seconds hits both alike; some
pairs are without it twice and tell the noise. Told is the median over the pairs, and between which
bounds the true one lies with 95 % certainty (order statistics of the median).

The recording code is also timed alone, for each step and each message, which is precise on any
machine, and is set beside the step's own time; so is what happens less often: an answer's end and a
scrape of /metrics, both at the router.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bench.load import random_prompt
from bench.report import Row, print_report
from bench.telemetry.direct import FAR_S, ending_us, fastest_s, message_us, recording_us
from core.clock import MonotonicClock
from core.config import Mode
from core.events.step import StepFacts
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.request import Request, RequestId, SamplingParams, WorkerName
from core.timeline import DecodeReport
from core.worker import Reserve, Role, WorkerInfo
from decode_worker.limits import Limits
from decode_worker.recording import Recording, recording_of
from decode_worker.scheduler import Scheduler
from decode_worker.step_log import StepLog
from decode_worker.worker import DecodeWorker
from deploy.model_store import fetch_model
from engine.block_pool import BlockPool
from engine.runner import Runner
from router.answer import Answer
from router.telemetry.exposition import NoTelemetry, Telemetry
from router.telemetry.measured import AnswerMeter, Measured

NUM_PROMPT_TOKENS = 64
# Fewer say nothing.
MIN_PAIRS = 50
# Pairs of the same streams; then others begin, so that histories stay short.
PAIRS_A_GROUP = 60
MAX_TOKENS = 4 * PAIRS_A_GROUP
KV_CACHE_BYTES = 512 << 20
SESSION = "bench"
# Of the direct measure.
BATCHES = (1, 16, 64)
# Standard deviations around the middle that hold 95 % of a normal distribution.
Z_95 = 1.96
AIM = 0.01


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step took."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two neighbouring steps; has_on: telemetry was on in `other`, else in neither."""

    has_on: bool
    other: Taken
    off: Taken

    def cost(self, value: Callable[[Taken], float]) -> float:
        """How much larger the value was in the step that may have had telemetry, as a share."""
        return value(self.other) / value(self.off) - 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the bounds of its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The ranks of the bounds are binomial, here by its normal approximation."""
        ordered = sorted(values)
        reach = Z_95 * len(ordered) ** 0.5 / 2
        low = max(round(len(ordered) / 2 - reach) - 1, 0)  # ranks count from 1
        return cls(statistics.median(ordered), ordered[low], ordered[len(ordered) - 1 - low])


class SwitchedPace:
    """Of one answer, its pace with telemetry and without; only one of them works in a step."""

    def __init__(self, switch: "Switched", began_s: float) -> None:
        self.began_s = began_s
        self._switch = switch
        self._on, self._off = (each.pace(began_s) for each in (switch.on, switch.off))

    def token(self, index: int, log: StepLog) -> None:
        """As `Pace.token`; the other one is told after the step, beside the clock."""
        now, later = (self._on, self._off) if self._switch.is_on else (self._off, self._on)
        now.token(index, log)
        self._switch.later.append(lambda: later.token(index, log))

    def report(self, slot_wait_s: float) -> DecodeReport:
        """As `Pace.report`."""
        return self._on.report(slot_wait_s)


class Switched:
    """A worker's recording that is on or off as its user says, before each step."""

    def __init__(self, token_bytes: int) -> None:
        self.is_on = False
        self.on, self.off = (
            recording_of(is_on=is_on, token_bytes=token_bytes) for is_on in (True, False)
        )
        self.later: list[Callable[[], None]] = []

    def step(self, log: StepLog, step: StepFacts) -> None:
        """As `Recording.step`."""
        (self.on if self.is_on else self.off).step(log, step)

    def pace(self, began_s: float) -> SwitchedPace:
        """As `Recording.pace`."""
        return SwitchedPace(self, began_s)

    def catch_up(self) -> None:
        """Tell what was off in the last step what it missed."""
        for call in self.later:
            call()
        self.later.clear()


class Loop:
    """A decode worker without its sockets, and what its router would measure."""

    def __init__(self, directory: Path) -> None:
        self._runner = runner = Runner(
            directory,
            dtype=Dtype.FLOAT32,
            num_threads=1,
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        runner.warm_up()
        info = WorkerInfo(
            name=WorkerName("decode-0"),
            role=Role.DECODE,
            incarnation="bench",
            model=str(directory),
            layout=runner.layout,
            num_blocks=runner.num_blocks,
            max_context_tokens=runner.max_context_tokens,
            vocab_size=runner.config.vocab_size,
            max_num_sequences=max(BATCHES),
            kernels=runner.kernels,
        )
        scheduler = Scheduler(
            Mode.CHUNKED, max_batch_tokens=1024, max_num_sequences=info.max_num_sequences
        )
        self._worker = DecodeWorker(
            info,
            BlockPool(runner.num_blocks, runner.layout.block_size),
            scheduler,
            Limits(info.max_context_tokens, info.max_num_sequences),
        )
        self._recording = Switched(runner.layout.token_bytes)
        self._worker.recording = cast(Recording, self._recording)  # it quacks
        self._clock = MonotonicClock()
        self._measured = {True: Measured(Telemetry()), False: Measured(NoTelemetry())}
        self._meters: dict[bool, dict[RequestId, AnswerMeter]] = {True: {}, False: {}}
        self._generator = random.Random(7)

    @property
    def max_streams(self) -> int:
        """Streams that have slots and blocks all at once; with more `begin` would not end."""
        info = self._worker.info
        num_cache_tokens = info.num_blocks * info.layout.block_size
        return min(info.max_num_sequences, num_cache_tokens // (NUM_PROMPT_TOKENS + MAX_TOKENS) - 1)

    def begin(self, num_streams: int) -> None:
        """End the streams before, and step until so many others all have a token."""
        now_s = self._clock.now_s()
        for request_id in self._meters[True]:
            self._worker.cancel(SESSION, request_id, now_s)
        requests = [self._request(i) for i in range(num_streams)]
        for is_on, measured in self._measured.items():
            self._meters[is_on] = {
                each.request_id: measured.meter(Answer(each, now_s, 0.0), self._clock)
                for each in requests
            }
        for request in requests:
            self._worker.reserve(SESSION, Reserve(request, prefill_locally=True), now_s)
        waiting = set(self._meters[True])
        while waiting:
            waiting -= self._step()
            self._recording.catch_up()

    def pair(self) -> Pair:
        """Two steps, of which one has telemetry, or neither."""
        has_on, is_first = self._generator.random() < 2 / 3, self._generator.random() < 1 / 2
        taken = [self.step(is_on=has_on and is_other) for is_other in (is_first, not is_first)]
        other, off = taken if is_first else taken[::-1]
        return Pair(has_on, other, off)

    def step(self, *, is_on: bool) -> Taken:
        """One step of all streams, and what it took."""
        self._recording.is_on = is_on
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        self._step()
        taken = Taken(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
        self._recording.catch_up()
        return taken

    def scrape_s(self) -> float:
        """Seconds that the router takes for /metrics, without what workers told it before."""
        telemetry = self._measured[True].telemetry
        return fastest_s(lambda: telemetry.exposition(()))

    def _step(self) -> set[RequestId]:
        steps = self._worker.next_steps(self._clock.now_s())
        result = self._runner.step(steps)
        self._worker.apply(result, self._clock.now_s())
        meters = self._meters[self._recording.is_on]
        update = self._worker.take_updates()[SESSION]
        for token in update.tokens:
            meters[token.request_id].delivered(1)
        return {token.request_id for token in update.tokens}

    def _request(self, index: int) -> Request:
        prompt = random_prompt(self._generator, NUM_PROMPT_TOKENS, self._runner.config.vocab_size)
        request_id = RequestId(f"{self._clock.now_s()}-{index}")
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        return Request(request_id, tuple(prompt), sampling, deadline_s=FAR_S)


def rows(pairs: Sequence[Pair], num_streams: int, scrape_s: float) -> list[Row]:
    """What the pairs and the direct measure say, in percent and microseconds."""
    step_us = 1e6 * statistics.median(pair.off.seconds for pair in pairs)
    told = [Row(f"decode step of {num_streams}, telemetry off", step_us / 1e3, "ms")]
    for name, value in (
        ("time", lambda taken: taken.seconds),
        ("processor time", lambda taken: taken.cpu_s),
    ):
        for has_on, what in ((True, "on against off"), (False, "off against off")):
            costs = [pair.cost(value) for pair in pairs if pair.has_on == has_on]
            told += _bounds(f"{name} of a step, {what}", Estimate.of(costs))
    for size in BATCHES:
        told.append(Row(f"recording a step of {size} sequences", recording_us(size), "us"))
    told.append(Row("measuring a message at the router", message_us(), "us"))
    whole_us = recording_us(num_streams) + num_streams * message_us()
    return [
        *told,
        Row("an answer's end at the router", ending_us(), "us"),
        Row("a scrape of /metrics at the router", 1e3 * scrape_s, "ms"),
        Row(f"recorded for a step of {num_streams}", *_percent(whole_us / step_us)),
    ]


def _bounds(name: str, estimate: Estimate) -> Iterator[Row]:
    yield Row(name, *_percent(estimate.median))
    yield Row(f"{name}, at least", 100 * estimate.low, "%")
    yield Row(f"{name}, at most", 100 * estimate.high, "%")


def _percent(share: float) -> tuple[float, str, str, float]:
    return 100 * share, "%", "aim", 100 * AIM


def measure(loop: Loop, num_pairs: int, num_streams: int) -> list[Pair]:
    """So many pairs, in groups of fresh streams."""
    pairs: list[Pair] = []
    while len(pairs) < num_pairs:
        loop.begin(num_streams)
        pairs += [loop.pair() for _ in range(min(PAIRS_A_GROUP, num_pairs - len(pairs)))]
    return pairs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.telemetry", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--streams", type=int, default=8, help="that decode side by side")
    asked = parser.parse_args()
    if asked.pairs < MIN_PAIRS:
        parser.error(f"--pairs is {asked.pairs}, at least {MIN_PAIRS}")
    loop = Loop(fetch_model(asked.model))
    if not 1 <= asked.streams <= loop.max_streams:
        parser.error(f"--streams is {asked.streams}, from 1 to {loop.max_streams}")
    pairs = measure(loop, asked.pairs, asked.streams)
    print_report("Telemetry on against off", rows(pairs, asked.streams, loop.scrape_s()))


if __name__ == "__main__":
    main()
