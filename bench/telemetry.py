"""What telemetry costs decode: everything on against off, in one run.

    python -m bench.telemetry [key=value ...] [--rounds N] [--streams N] [--tokens N]

Two clusters of the same configuration, one with telemetry.enabled false, take turns on the same
cores, each round off, on, off again; while on, /metrics is scraped once a second. A turn is some
streams that decode side by side, from the moment when the last one has begun to the end of the
first. Told are the medians over the rounds of

    on against off              of a round, off being the mean of its two turns
    off against off             of a round: what the machine does by itself, the noise floor

once in tokens a second, and once in processor seconds a token, of all servers of the cluster, which
other programs disturb less. The recording code is also timed directly, for each decode step and for
each message of the router: that is precise on any machine, and is set beside the step's own time.
"""

import argparse
import asyncio
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from bench.load import StreamLog, random_prompt, stream
from bench.parity import wait_until_ready
from bench.report import Row, print_report
from core.clock import MonotonicClock
from core.config import load_config
from core.events.step import StepFacts
from core.request import Request, RequestId, SamplingParams
from decode_worker.recording import recording_of
from decode_worker.step_log import StepLog
from deploy.local_cluster import LocalCluster, local_cluster
from router.answer import Answer
from router.telemetry.exposition import NoTelemetry, Telemetry
from router.telemetry.measured import Measured
from twophase.client import AsyncClient

SETUP = ("router.port=0", "router.http_port=0", "decode.kv_cache=256MiB", "prefill.kv_cache=256MiB")
NUM_PROMPT_TOKENS = 64
REQUEST_TIMEOUT_S = 120.0
SCRAPE_S = 1.0
# Of the direct measure: batches, and calls of which the fastest repeat counts.
BATCHES = (1, 16, 64)
NUM_CALLS, NUM_REPEATS = 300, 15
AIM = 0.01


@dataclass(frozen=True, slots=True)
class Turn:
    """Streams that decoded side by side: tokens of all, in so long, at so much processor time."""

    num_tokens: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """What clients saw."""
        return self.num_tokens / self.seconds

    @property
    def cpu_per_token_s(self) -> float:
        """What the servers took."""
        return self.cpu_s / self.num_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """One turn with everything on between two with everything off."""

    before: Turn
    on: Turn
    after: Turn

    def cost(self, value: Callable[[Turn], float]) -> float:
        """How much larger the value is with everything on, as a share."""
        return value(self.on) / statistics.mean((value(self.before), value(self.after))) - 1

    def noise(self, value: Callable[[Turn], float]) -> float:
        """How much larger it was in the later of the turns that were off."""
        return value(self.after) / value(self.before) - 1


@dataclass(slots=True)
class Contender:
    """A running cluster and its client; is_scraped while its turn lasts."""

    client: AsyncClient
    servers: tuple[psutil.Process, ...]
    vocab_size: int
    metrics_url: str | None

    async def turn(self, num_streams: int, num_tokens: int, generator: random.Random) -> Turn:
        """Decode so many streams of so many tokens."""
        logs = [StreamLog() for _ in range(num_streams)]
        all_began, one_ended = asyncio.Event(), asyncio.Event()

        def arrived() -> None:
            if all(log.arrivals for log in logs):
                all_began.set()

        async def run(log: StreamLog) -> None:
            prompt = random_prompt(generator, NUM_PROMPT_TOKENS, self.vocab_size)
            await stream(
                self.client,
                prompt,
                log,
                max_tokens=num_tokens,
                timeout_s=REQUEST_TIMEOUT_S,
                on_arrival=arrived,
            )
            one_ended.set()

        async with asyncio.TaskGroup() as tasks:
            scraping = tasks.create_task(self._scrape())
            running = [tasks.create_task(run(log)) for log in logs]
            await all_began.wait()
            began_s, began_cpu_s = time.monotonic(), self._cpu_s()
            await one_ended.wait()
            ended_s, cpu_s = time.monotonic(), self._cpu_s() - began_cpu_s
            await asyncio.wait(running)
            scraping.cancel()
        tokens = sum(log.num_tokens_between(began_s, ended_s) for log in logs)
        return Turn(tokens, ended_s - began_s, cpu_s)

    async def _scrape(self) -> None:
        while self.metrics_url is not None:
            await asyncio.to_thread(_read, self.metrics_url)
            await asyncio.sleep(SCRAPE_S)

    def _cpu_s(self) -> float:
        times = [server.cpu_times() for server in self.servers]
        return sum(time_.user + time_.system for time_ in times)


def _read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=SCRAPE_S) as reply:
        reply.read()


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

    return _fastest_s(record) / NUM_CALLS


def message_us() -> float:
    """Microseconds for each message with tokens that the router's histograms take."""
    return 1e6 * (_message_s(Telemetry()) - _message_s(NoTelemetry()))


def _message_s(telemetry: Telemetry) -> float:
    clock = MonotonicClock()
    request = Request(RequestId("r"), (1,), SamplingParams(max_tokens=1), deadline_s=1e9)
    meter = Measured(telemetry).meter(Answer(request, clock.now_s(), 0.0), clock)

    def deliver() -> None:
        for _ in range(NUM_CALLS):
            meter.delivered(1)

    return _fastest_s(deliver) / NUM_CALLS


def _fastest_s(call: Callable[[], None]) -> float:
    seconds = []
    for _ in range(NUM_REPEATS):
        began_s = time.thread_time()  # which others on the core do not lengthen
        call()
        seconds.append(time.thread_time() - began_s)
    return min(seconds)


def rows(rounds: Sequence[Round], num_streams: int) -> list[Row]:
    """What the rounds and the direct measure say, in percent and microseconds."""
    off = [turn for one in rounds for turn in (one.before, one.after)]
    rate = statistics.median(turn.tokens_per_s for turn in off)
    step_us = 1e6 * num_streams / rate
    told = [
        Row("decode, telemetry off", rate, "tokens/s"),
        Row("decode step, telemetry off", step_us / 1e3, "ms"),
    ]
    for name, value in (
        ("time", lambda turn: 1 / turn.tokens_per_s),
        ("processor time", lambda turn: turn.cpu_per_token_s),
    ):
        costs, noises = [r.cost(value) for r in rounds], [abs(r.noise(value)) for r in rounds]
        told += [
            Row(f"{name} a token, on against off", *_percent(statistics.median(costs))),
            Row(f"{name} a token, off against off", *_percent(statistics.median(noises))),
        ]
    for size in BATCHES:
        told.append(Row(f"recording a step of {size} sequences", recording_us(size), "us"))
    told.append(Row("measuring a message at the router", message_us(), "us"))
    whole_us = recording_us(num_streams) + num_streams * message_us()
    told.append(
        Row(
            f"all of it for a step of {num_streams}",
            100 * whole_us / step_us,
            "% of the step",
            "aim",
            100 * AIM,
        )
    )
    return told


def _percent(share: float) -> tuple[float, str, str, float]:
    return 100 * share, "%", "aim", 100 * AIM


async def _contender(cluster: LocalCluster, client: AsyncClient, *, is_on: bool) -> Contender:
    await wait_until_ready(client)
    servers = tuple(psutil.Process(child.process.pid) for child in cluster.children.values())
    url = f"http://{(await client.status()).http_address}/metrics" if is_on else None
    return Contender(client, servers, (await client.model()).vocab_size, url)


async def _rounds(on: LocalCluster, off: LocalCluster, asked: argparse.Namespace) -> list[Round]:
    generator = random.Random(7)
    async with AsyncClient(on.address) as on_client, AsyncClient(off.address) as off_client:
        with_it = await _contender(on, on_client, is_on=True)
        without = await _contender(off, off_client, is_on=False)

        async def turn(contender: Contender) -> Turn:
            return await contender.turn(asked.streams, asked.tokens, generator)

        for contender in (with_it, without):
            await turn(contender)  # warms up
        return [
            Round(await turn(without), await turn(with_it), await turn(without))
            for _ in range(asked.rounds)
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.telemetry", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value, as in the YAML: model=DIRECTORY")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8, help="that decode side by side")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    asked = parser.parse_args()
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(
                local_cluster(
                    load_config(None, [*SETUP, *asked.overrides, f"telemetry.enabled={is_on}"]),
                    tell=lambda line: None,
                )
            )
            for is_on in ("true", "false")
        )
        rounds = asyncio.run(_rounds(on, off, asked))
    print_report("Telemetry on against off", rows(rounds, asked.streams))


if __name__ == "__main__":
    main()
