"""The simulator against a real cluster: `make bench-simulate-reality`.

One cluster of one prefill and one decode worker (child processes, SmolLM2-135M in bfloat16) is used
throughout:

1 it is measured: prompts and batches, alone and beside each other (`calibration`)
2 it gets a load, open loop: random arrivals and lengths
3 it is measured, gets the same load, and is measured a last time: the speed of many machines
  changes within minutes
4 the same arrivals are simulated on each of the three machines that were measured, and count as one
  load

Rows: quantiles of time to first token and of mean time per token after it as the client saw them,
beside those simulated, and by how many percent these are off; then by how many percent the second
load differed from the first, which no model can be better than.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bench.load import StreamLog, random_prompt, stream
from bench.machine import CpuMeter
from bench.report import Row, print_report
from bench.simulate.calibration import Calibration
from bench.simulate.cluster import Simulation
from bench.simulate.machine import Machine
from bench.simulate.outcome import quantiles
from bench.simulate.trace import Arrival, poisson
from core.config import ClusterConfig, load_config
from core.errors import TwophaseError
from core.model_path import DEFAULT_MODEL
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from deploy.own_client import wait_until_ready
from twophase.client import AsyncClient

READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 300.0
REQUESTS_PER_S, PROMPT_TOKENS, OUTPUT_TOKENS = 0.6, 350, 32
SETTINGS = (
    "engine.dtype=bfloat16",
    *("router.port=0", "router.http_port=null"),
    *("prefill.kv_cache=200MiB", "decode.kv_cache=400MiB", "decode.max_num_sequences=16"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a load: seconds to first token, and per token after it; failed requests."""

    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]
    num_failed: int = 0

    def __add__(self, other: "Seen") -> "Seen":
        """Both loads as one."""
        return Seen(
            self.ttfts_s + other.ttfts_s,
            self.tpots_s + other.tpots_s,
            self.num_failed + other.num_failed,
        )


NOTHING = Seen((), ())


async def send(client: AsyncClient, vocab_size: int, arrivals: Sequence[Arrival]) -> Seen:
    """Each request at its time, whatever became of those before; all are waited for."""
    draw, started_s = random.Random(7), time.monotonic() + 1.0
    logs = [StreamLog() for _ in arrivals]
    tasks = []
    for arrival, log in zip(arrivals, logs, strict=True):
        prompt = random_prompt(draw, arrival.num_prompt_tokens, vocab_size)
        await asyncio.sleep(max(started_s + arrival.at_s - time.monotonic(), 0.0))
        num_tokens = arrival.num_output_tokens
        one = stream(client, prompt, log, max_tokens=num_tokens, timeout_s=REQUEST_TIMEOUT_S)
        tasks.append(asyncio.ensure_future(one))
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, TwophaseError):
            raise error
    good = [log for log, error in zip(logs, ended, strict=True) if error is None]
    spans = [(log.arrivals[-1].at_s - log.arrivals[0].at_s, log.num_tokens - 1) for log in good]
    return Seen(
        tuple(log.ttft_s for log in good),
        tuple(span_s / gaps for span_s, gaps in spans if gaps),
        len(ended) - len(good),
    )


async def measure(
    address: str, arrivals: Sequence[Arrival], seed: int
) -> tuple[list[Machine], Seen, Seen]:
    """The machine as it was thrice, and what came of the load at its first and second time."""
    async with AsyncClient(address) as client:
        vocab_size = (await client.model()).vocab_size
        calibration = Calibration(client, vocab_size, seed=seed)
        machines = [(await calibration.run()).machine()]
        first = await send(client, vocab_size, arrivals)
        machines.append((await calibration.run()).machine())
        second = await send(client, vocab_size, arrivals)
        machines.append((await calibration.run()).machine())
    return machines, first, second


def simulated(config: ClusterConfig, machine: Machine, arrivals: Sequence[Arrival]) -> Seen:
    """The same, as the simulator has it."""
    trips = Simulation(config, machine, decide=None).run(arrivals).trips
    good = [trip for trip in trips if not trip.failure]
    ttfts = tuple(trip.ttft_s for trip in good if trip.ttft_s is not None)
    tpots = tuple(trip.tpot_s for trip in good if trip.tpot_s is not None)
    return Seen(ttfts, tpots, len(trips) - len(good))


def rows_of(first: Seen, second: Seen, model: Seen) -> list[Row]:
    """Each quantile, how far off the simulated one is, and how far the second is off the first."""
    rows, noise = [], []
    both = first + second
    for name, seen in (("time to first token", "ttfts_s"), ("time per token after it", "tpots_s")):
        values = (quantiles(getattr(each, seen)) for each in (both, model, first, second))
        for share, real_s, model_s, first_s, second_s in zip(("p50", "p95"), *values, strict=True):
            rows.append(Row(f"{name}, {share}", real_s * 1e3, "ms", "simulated", model_s * 1e3))
            off = (model_s / real_s - 1) * 100
            rows.append(Row(f"{name}, {share}: simulated less measured", off, "%", "aim", 10.0))
            turned = (second_s / first_s - 1) * 100
            noise.append(Row(f"{name}, {share}: second load less the first", turned, "%"))
    failed = Row("requests that failed", both.num_failed, "", "simulated", model.num_failed)
    return [*rows, *noise, failed]


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="Of the load, each time.")
    parser.add_argument("--seed", type=int, default=11)
    words = parser.parse_args()
    config = load_config(None, [f"model={fetch_model(DEFAULT_MODEL)}", *SETTINGS])
    out = Console(soft_wrap=True, highlight=False, markup=False)
    arrivals = poisson(REQUESTS_PER_S, words.seconds, PROMPT_TOKENS, OUTPUT_TOKENS, seed=words.seed)
    with local_cluster(config, tell=lambda line: None) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)
        meter = CpuMeter()
        machines, first, second = asyncio.run(measure(cluster.address, arrivals, words.seed))
        other_cores = meter.read().other_cores
    for machine in machines:
        out.print(f"measured: {machine}")
    model = sum((simulated(config, machine, arrivals) for machine in machines), NOTHING)
    rows = rows_of(first, second, model)
    title = f"{len(arrivals)} requests, measured twice and simulated"
    print_report(title, rows, {"other_cores": other_cores})


if __name__ == "__main__":
    main()
