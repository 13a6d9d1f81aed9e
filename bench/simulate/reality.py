"""The simulator against a real cluster: `make bench-simulate-reality`.

1 a cluster of one prefill and one decode worker (child processes, SmolLM2-135M in bfloat16) is
  measured: prompts and batches, alone and beside each other (`calibration`)
2 another such cluster gets a load, open loop: random arrivals and lengths
3 the same arrivals are simulated on a machine with the measured coefficients

Rows: quantiles of time to first token and of mean time per token after it as the client saw them,
beside those simulated, and by how many percent these are off. The model knows medians: where other
processes take cores, single requests take longer than it says.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Waits:
    """(p50, p95) of time to first token and of mean time per token after it; failed requests."""

    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    num_failed: int = 0


def with_cluster(
    config: ClusterConfig, act: Callable[[AsyncClient, int], Awaitable[Result]]
) -> Result:
    """What `act` gives of a fresh cluster; it gets a client and the size of the vocabulary."""
    with local_cluster(config, tell=lambda line: None) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)

        async def run() -> Result:
            async with AsyncClient(cluster.address) as client:
                return await act(client, (await client.model()).vocab_size)

        return asyncio.run(run())


async def send(client: AsyncClient, vocab_size: int, arrivals: Sequence[Arrival]) -> Waits:
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
    return Waits(
        quantiles([log.ttft_s for log in good]),
        quantiles([span_s / gaps for span_s, gaps in spans if gaps]),
        len(ended) - len(good),
    )


def simulated(config: ClusterConfig, machine: Machine, arrivals: Sequence[Arrival]) -> Waits:
    """The same, as the simulator has it."""
    trips = Simulation(config, machine, decide=None).run(arrivals).trips
    good = [trip for trip in trips if not trip.failure]
    ttfts, tpots = [trip.ttft_s for trip in good], [trip.tpot_s for trip in good]
    return Waits(quantiles(ttfts), quantiles(tpots), len(trips) - len(good))


def rows_of(real: Waits, model: Waits) -> list[Row]:
    """Each quantile, and how far off the simulated one is."""
    rows = []
    for name, measured, modelled in (
        ("time to first token", real.ttft_s, model.ttft_s),
        ("time per token after it", real.tpot_s, model.tpot_s),
    ):
        for share, real_s, model_s in zip(("p50", "p95"), measured, modelled, strict=True):
            rows.append(Row(f"{name}, {share}", real_s * 1e3, "ms", "simulated", model_s * 1e3))
            off = (model_s / real_s - 1) * 100
            rows.append(Row(f"{name}, {share}: simulated less measured", off, "%", "aim", 10.0))
    rows.append(Row("requests that failed", real.num_failed, "", "simulated", model.num_failed))
    return rows


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="Of the load.")
    parser.add_argument("--seed", type=int, default=11)
    words = parser.parse_args()
    config = load_config(None, [f"model={fetch_model(DEFAULT_MODEL)}", *SETTINGS])
    out = Console(soft_wrap=True, highlight=False, markup=False)
    arrivals = poisson(REQUESTS_PER_S, words.seconds, PROMPT_TOKENS, OUTPUT_TOKENS, seed=words.seed)
    meter = CpuMeter()
    machine = with_cluster(config, lambda c, v: Calibration(c, v, seed=words.seed).run()).machine()
    quiet = meter.read().other_cores
    out.print(f"measured alone: {machine}")
    meter = CpuMeter()
    real = with_cluster(config, lambda client, vocab: send(client, vocab, arrivals))
    other_cores = {"other_cores_calibration": quiet, "other_cores": meter.read().other_cores}
    rows = rows_of(real, simulated(config, machine, arrivals))
    print_report(f"{len(arrivals)} requests, measured and simulated", rows, other_cores)


if __name__ == "__main__":
    main()
