"""What one core of router sustains, and what it adds: make bench-frontdoor.

The router is a process of its own, pinned to one core; the instant double and the clients share
another one. The offered rate climbs until the router falls behind (tokens then share messages, or
come later than offered); added latency is measured at half of the last rate that it kept up with.
A token's latency is counted from the moment that the double hands it to the transport until the
client has read it, so that the clients' own time is in it.

    python -m bench.frontdoor [model=DIRECTORY] [--streams 64] [--seconds 3]
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from bench.frontdoor.load import GrpcLoad, Received, SseLoad
from bench.frontdoor.service import InstantDecode, InstantPrefill, Steps
from bench.parity import wait_until_ready
from bench.report import Row, print_report
from core.config import load_config
from core.model_path import find_model
from core.request import RequestId
from core.worker import Role
from router.text.tokenizer import Tokenizer
from twophase.client import AsyncClient
from twophase.credentials import Access
from twophase.server import running_server

START_PER_S = 2_000.0
GROWTH = 1.25
# Of the offered tokens, those that must come in time and in messages of their own.
SUSTAINED_SHARE = 0.95
OFFERED_SHARE = 0.9
AIM_PER_S = {"gRPC": 10_000.0, "SSE": 4_000.0}
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One rate: asked of the double, offered by it, what came of it, and at what cost."""

    asked_per_s: float
    offered_per_s: float
    messages_per_s: float
    tokens_per_s: float
    router_cpu_share: float
    delays_ms: tuple[float, ...]

    @property
    def is_sustained(self) -> bool:
        """Whether the router kept up: as many messages as tokens, as fast as offered."""
        return self.messages_per_s >= SUSTAINED_SHARE * self.offered_per_s

    @property
    def is_offered(self) -> bool:
        """Whether double and clients kept up; else the bench is at its own limit."""
        return self.offered_per_s >= OFFERED_SHARE * self.asked_per_s

    @property
    def messages_per_cpu_s(self) -> float:
        """What one core does if this was all that it did."""
        return self.messages_per_s / self.router_cpu_share

    def delay_ms(self, quantile: float) -> float:
        """A quantile of the tokens' delays."""
        return self.delays_ms[min(int(quantile * len(self.delays_ms)), len(self.delays_ms) - 1)]


@dataclass(slots=True)
class Bench:
    """A running router over the double."""

    steps: Steps
    router: psutil.Process
    num_streams: int
    seconds: float
    _num_runs: int = 0

    async def measure(self, load: GrpcLoad | SseLoad, asked_per_s: float) -> Measured:
        """Have so many tokens a second offered for about `seconds`."""
        self._num_runs += 1
        self.steps.emitted_s.clear()
        self.steps.step_s = self.num_streams / asked_per_s
        num_tokens = max(2, round(self.seconds / self.steps.step_s))
        received = Received(self.steps.emitted_s)
        started_s, started_cpu_s = time.monotonic(), self._cpu_s()
        async with asyncio.TaskGroup() as streams:
            for number in range(self.num_streams):
                request_id = RequestId(f"load-{self._num_runs}-{number}")
                streams.create_task(load.stream(request_id, num_tokens, received))
        cpu_share = (self._cpu_s() - started_cpu_s) / (time.monotonic() - started_s)
        return Measured(
            asked_per_s,
            received.num_tokens / received.emitting_seconds,
            received.num_messages / received.seconds,
            received.num_tokens / received.seconds,
            cpu_share,
            tuple(sorted(delay_s * 1e3 for delay_s in received.delays_s)),
        )

    async def climb(self, load: GrpcLoad | SseLoad) -> tuple[Measured, Measured]:
        """The last rate that was sustained, and the one after it."""
        await self.measure(load, START_PER_S)  # warms up
        last = over = await self.measure(load, START_PER_S)
        while over.is_sustained and over.is_offered:
            last = over
            over = await self.measure(load, over.asked_per_s * GROWTH)
            if not over.is_sustained:  # once more: the machine may have been busy
                over = await self.measure(load, over.asked_per_s)
        return last, over

    def _cpu_s(self) -> float:
        times = self.router.cpu_times()
        return times.user + times.system


@asynccontextmanager
async def _double(tokenizer: Tokenizer, model: str) -> AsyncIterator[tuple[Steps, list[str]]]:
    """Both workers, listening; yields their state and addresses."""
    plain = [i for i in range(100, tokenizer.vocab_size) if tokenizer.bytes_of(i).isalpha()]
    steps = Steps(tuple(plain[:1000]))
    workers: tuple[InstantPrefill | InstantDecode, ...] = (
        InstantPrefill(Role.PREFILL, model, tokenizer.vocab_size, steps),
        InstantDecode(Role.DECODE, model, tokenizer.vocab_size, steps),
    )
    async with (
        running_server("127.0.0.1:0", Access(), stop_grace_s=0.0) as prefill,
        running_server("127.0.0.1:0", Access(), stop_grace_s=0.0) as decode,
        asyncio.TaskGroup() as tasks,
    ):
        for worker, server in zip(workers, (prefill, decode), strict=True):
            worker.add_to(server.grpc)
            worker.address = await server.start()
        running = tasks.create_task(steps.run())
        yield steps, [worker.address for worker in workers]
        running.cancel()


@asynccontextmanager
async def _router(core: int, model: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A router process on one core; yields it and its gRPC address.

    Contract: called before this process has a gRPC thread, which a fork could not take along.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "router.port=0", "router.http_port=0", f"model={model}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        assert process.stdout is not None
        address = await asyncio.to_thread(process.stdout.readline)
        yield psutil.Process(process.pid), address.strip()
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _rows(protocol: str, last: Measured, over: Measured, half: Measured) -> list[Row]:
    unit = {"gRPC": "messages/s", "SSE": "events/s"}[protocol]
    aim = AIM_PER_S[protocol]
    beyond = "overloaded" if over.is_offered else "with double and clients at their limit"
    return [
        Row(f"{protocol} sustained", last.messages_per_s, unit, "aim", aim),
        Row(f"{protocol} sustained, router CPU", last.router_cpu_share, "cores"),
        Row(f"{protocol} per CPU second at that rate", last.messages_per_cpu_s, unit, "aim", aim),
        Row(f"{protocol} {beyond}", over.messages_per_s, unit, "offered", over.offered_per_s),
        Row(f"{protocol} {beyond}, tokens", over.tokens_per_s, "tokens/s"),
        Row(f"{protocol} at half load", half.messages_per_s, unit),
        Row(f"{protocol} at half load, router CPU", half.router_cpu_share, "cores"),
        Row(f"{protocol} added latency p50 at half load", half.delay_ms(0.5), "ms"),
        Row(f"{protocol} added latency p99 at half load", half.delay_ms(0.99), "ms"),
    ]


async def _run(model: str, num_streams: int, seconds: float) -> list[Row]:
    tokenizer = Tokenizer.load(find_model(model))
    *others, core = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(others) or {core})
    rows: list[Row] = []
    async with (
        _router(core, model) as (router, address),
        _double(tokenizer, model) as (steps, workers),
    ):
        async with AsyncClient(address) as client:
            for worker in workers:
                await client.add_worker(worker)
            await wait_until_ready(client)
            http_address = (await client.status()).http_address
        bench = Bench(steps, router, num_streams, seconds)
        loads: dict[str, GrpcLoad | SseLoad] = {
            "gRPC": GrpcLoad(address),
            "SSE": SseLoad(http_address),
        }
        for protocol, load in loads.items():
            last, over = await bench.climb(load)
            half = await bench.measure(load, last.asked_per_s / 2)
            rows += _rows(protocol, last, over, half)
            await load.close()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.frontdoor", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value, as in the YAML: model=DIRECTORY")
    parser.add_argument("--streams", type=int, default=64, help="running at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    arguments = parser.parse_args()
    config = load_config(None, arguments.overrides)
    rows = asyncio.run(_run(config.model, arguments.streams, arguments.seconds))
    print_report("Front door on one core, engines replaced by the instant double", rows)


if __name__ == "__main__":
    main()
