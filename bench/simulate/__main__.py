"""How the autoscaler does beside others, on a manual clock: `make bench-simulate`.

Every load is played with a budget of so many workers by

- static: the split that does best with the very same load, of those that were tried,
- queue length and utilisation, as `peers` tells,
- twophase: deploy/autoscaler, which begins with an even split.

Rows give the share of good answers, worker-hours, and how often the pools turned round; the peer of
each is the best static split, which always runs the whole budget. One more row compares the
autoscaler with the best static split of as many workers as it had on average. Loads: one that turns
from long prompts to long answers, and every trace given.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from bench.report import Row, print_report
from bench.simulate.cluster import BLOCK_TOKENS, Autoscaled, Decide, Simulation
from bench.simulate.machine import fitted
from bench.simulate.outcome import Outcome, Slo
from bench.simulate.peers import HorizontalScaler, queue_length, utilisation
from bench.simulate.trace import Arrival, poisson, read_trace, scaled, turning
from core.config import ClusterConfig, load_config
from core.scaling import DecodeScaling, PoolScaling, ScalingConfig

# Of each trace, so many times its rate keep ten workers of the fitted machine well used.
RATES = {"azure_llm_2023_conv": 0.45, "azure_llm_2023_code": 0.12, "mooncake_conversation": 3.0}
SPEED_REQUESTS = 100_000


def config_of(num_prefill: int, num_decode: int, budget: int) -> ClusterConfig:
    """A cluster that begins with these workers and may have `budget`."""
    scaling = ScalingConfig(
        prefill=PoolScaling(max_replicas=budget),
        decode=DecodeScaling(max_replicas=budget, target_step_s=0.12),
        budget=budget,
    )
    words = [f"prefill.replicas={num_prefill}", f"decode.replicas={num_decode}"]
    words += ["decode.max_num_sequences=16", "engine.dtype=bfloat16"]
    return load_config(None, words).model_copy(update={"scaling": scaling})


def play(config: ClusterConfig, arrivals: Sequence[Arrival], decide: Decide | None) -> Outcome:
    """One run."""
    return Outcome.of(Simulation(config, fitted(), decide=decide).run(arrivals), Slo())


def best_static(arrivals: Sequence[Arrival], budget: int) -> tuple[int, Outcome]:
    """Prefill workers of the best split, and what it does."""
    found: dict[int, Outcome] = {}

    def attempt(numbers: Sequence[int]) -> int:
        for number in numbers:
            if 0 < number < budget and number not in found:
                config = config_of(number, budget - number, budget)
                found[number] = play(config, arrivals, None)
        return max(found, key=lambda number: found[number].attainment)

    step = max(budget // 10, 1)
    best = attempt(range(step, budget, step))
    while step > max(budget // 40, 1):
        step //= 2
        best = attempt((best - step, best + step))
    return best, found[best]


def compare(name: str, arrivals: Sequence[Arrival], budget: int) -> list[Row]:
    """Rows of one load."""
    best, static = best_static(arrivals, budget)
    even = config_of(budget // 2, budget - budget // 2, budget)
    assert even.scaling is not None
    outcomes = {
        "queue length": play(even, arrivals, HorizontalScaler(even.scaling, queue_length)),
        "utilisation": play(even, arrivals, HorizontalScaler(even.scaling, utilisation)),
        "twophase": play(even, arrivals, Autoscaled(even)),
    }
    peer = f"static {best}P+{budget - best}D"
    rows = []
    for who, outcome in outcomes.items():
        prefix = f"{name}, {budget} workers, {who}:"
        rows += [
            Row(f"{prefix} good answers", outcome.attainment, "share", peer, static.attainment),
            Row(f"{prefix} worker-hours", outcome.worker_hours, "h", peer, static.worker_hours),
            Row(f"{prefix} turns", outcome.num_turns, "times"),
        ]
    ours = outcomes["twophase"]
    mean = max(round(budget * ours.worker_hours / static.worker_hours), 2)
    best, equal = best_static(arrivals, mean)
    name = f"{name}, {budget} workers, twophase: good answers for its worker-hours"
    peer = f"static {best}P+{mean - best}D"
    return [*rows, Row(name, ours.attainment, "share", peer, equal.attainment)]


def speed() -> Row:
    """CPU seconds for SPEED_REQUESTS requests on ten workers, autoscaled; the limit is a minute."""
    config = config_of(5, 5, 10)
    arrivals = scaled(poisson(2.0, 3600.0, 512, 128), num_requests=SPEED_REQUESTS)
    started_s = time.process_time()
    play(config, arrivals, Autoscaled(config))
    seconds = time.process_time() - started_s
    return Row(f"{SPEED_REQUESTS} requests simulated", seconds, "CPU s", "limit", 60.0)


def main() -> None:
    """Play all loads and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="Azure CSV or Mooncake JSON lines.")
    parser.add_argument("--workers", type=int, nargs="+", default=[10])
    parser.add_argument("--requests", type=int, default=6000, help="Of each load.")
    words = parser.parse_args()
    rows = []
    for budget in words.workers:
        share = budget / 10
        rows += compare("turning load", scaled(turning(1800.0), rate=share), budget)
        for path in words.traces:
            trace = read_trace(path, block_size=BLOCK_TOKENS)
            rate = RATES.get(path.stem, 1.0) * share
            arrivals = scaled(trace, rate=rate, num_requests=words.requests)
            rows += compare(path.stem, arrivals, budget)
    print_report("The autoscaler on a manual clock", [*rows, speed()])


if __name__ == "__main__":
    main()
