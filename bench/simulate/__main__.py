"""How the autoscaler does beside others, on a manual clock: `make bench-simulate`.

Every load is played with a budget of so many workers by

- static: the split that does best with the very same load, of those that were tried,
- queue length and utilisation, as `peers` tells,
- twophase: deploy/autoscaler, which begins with an even split.

Rows give the share of good answers, worker-hours, and how often the pools turned round; the peer of
each is the best static split, which always runs the whole budget. Up to a hundred workers, one more
row compares the autoscaler with the best static split of as many workers as it had on average.
Loads: every trace given, and up to a hundred workers one that turns from long prompts to long
answers. More than ten workers get copies of the load over each other, shifted in time (`overlaid`).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.report import Row, print_report
from bench.simulate.cluster import BLOCK_TOKENS, Autoscaled, Decide, Simulation
from bench.simulate.machine import fitted
from bench.simulate.outcome import Outcome, Slo
from bench.simulate.peers import HorizontalScaler, queue_length, utilisation
from bench.simulate.trace import Arrival, overlaid, poisson, read_trace, scaled, turning
from core.config import ClusterConfig, load_config
from core.settings.scaling import DecodeScaling, PoolScaling, ScalingConfig

# Of each trace, so many times its rate keep ten workers of the fitted machine well used.
RATES = {"azure_llm_2023_conv": 0.45, "azure_llm_2023_code": 0.12, "mooncake_conversation": 3.0}
LOAD_WORKERS = 10
SPEED_REQUESTS = MAX_REQUESTS = 100_000
# Up to so many workers every tenth split is tried, and the turning load is played.
SEARCHED_WORKERS = 100

_PROGRESS = Console(stderr=True)


def config_of(num_prefill: int, num_decode: int, budget: int) -> ClusterConfig:
    """A cluster that begins with these workers and may have `budget`."""
    scaling = ScalingConfig(
        prefill=PoolScaling(max_replicas=budget),
        decode=DecodeScaling(max_replicas=budget, target_step_s=0.12),
        budget=budget,
    )
    words = [f"prefill.replicas={num_prefill}", f"decode.replicas={num_decode}"]
    words += ["decode.max_num_sequences=16", "engine.dtype=bfloat16"]
    # As many in line for each worker as ten workers have by default.
    words += [f"router.max_queued_requests={max(1024, 100 * budget)}"]
    return load_config(None, words).model_copy(update={"scaling": scaling})


def play(
    config: ClusterConfig,
    arrivals: Sequence[Arrival],
    decide: Decide | None,
    *,
    who: str = "static",
) -> Outcome:
    """One run; what came of it is told at once, since all of them may take an hour."""
    started_s = time.process_time()
    outcome = Outcome.of(Simulation(config, fitted(), decide=decide).run(arrivals), Slo())
    pools = (config.prefill_pool, config.decode)
    split = "+".join(str(pool.replicas) for pool in pools if pool is not None)
    _PROGRESS.print(
        f"{len(arrivals):7} requests, {who} {split}: {outcome.attainment:.2%} good, "
        f"{outcome.worker_hours:.2f} worker-hours ({time.process_time() - started_s:.0f} CPU s)",
        highlight=False,
    )
    return outcome


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives; `arrivals` are as many as LOAD_WORKERS workers can serve."""

    name: str
    arrivals: Sequence[Arrival]

    def of(self, budget: int) -> list[Arrival]:
        """As many as `budget` workers can serve, in the same time; at most MAX_REQUESTS."""
        copies = max(round(budget / LOAD_WORKERS), 1)
        rate = budget / LOAD_WORKERS / copies
        return scaled(overlaid(self.arrivals, copies), rate=rate)[:MAX_REQUESTS]


def best_static(arrivals: Sequence[Arrival], budget: int) -> tuple[int, Outcome]:
    """Prefill workers of the best split, and what it does; every tenth is tried first."""
    step = max(budget // 10, 1)
    return _best_of(arrivals, budget, range(step, budget, step), step)


def best_static_near(load: Load, budget: int) -> tuple[int, Outcome]:
    """The same of a large budget, from the best split of a tenth of load and budget."""
    small, _ = best_static(load.of(budget // 10), budget // 10)
    return _best_of(load.of(budget), budget, [small * 10], max(budget // 10, 1))


def _best_of(
    arrivals: Sequence[Arrival], budget: int, first: Sequence[int], step: int
) -> tuple[int, Outcome]:
    found: dict[int, Outcome] = {}

    def attempt(numbers: Sequence[int]) -> int:
        for number in numbers:
            if 0 < number < budget and number not in found:
                config = config_of(number, budget - number, budget)
                found[number] = play(config, arrivals, None)
        return max(found, key=lambda number: found[number].attainment)

    best = attempt(first)
    while step > max(budget // 40, 1):
        step //= 2
        best = attempt((best - step, best + step))
    return best, found[best]


def compare(load: Load, budget: int) -> list[Row]:
    """Rows of one load."""
    arrivals = load.of(budget)
    _PROGRESS.print(f"{load.name}, {budget} workers", style="bold")
    is_large = budget > SEARCHED_WORKERS
    best, static = best_static_near(load, budget) if is_large else best_static(arrivals, budget)
    even = config_of(budget // 2, budget - budget // 2, budget)
    assert even.scaling is not None
    others = {
        "queue length": HorizontalScaler(even.scaling, queue_length),
        "utilisation": HorizontalScaler(even.scaling, utilisation),
    }
    outcomes = {who: play(even, arrivals, decide, who=who) for who, decide in others.items()}
    started_s = time.process_time()
    ours = outcomes["twophase"] = play(even, arrivals, Autoscaled(even), who="twophase")
    seconds = time.process_time() - started_s
    name, peer = f"{load.name}, {budget} workers", f"static {best}P+{budget - best}D"
    rows = [Row(f"{name}: simulated requests", len(arrivals) / seconds, "per CPU s")]
    for who, outcome in outcomes.items():
        prefix = f"{name}, {who}:"
        rows += [
            Row(f"{prefix} good answers", outcome.attainment, "share", peer, static.attainment),
            Row(f"{prefix} worker-hours", outcome.worker_hours, "h", peer, static.worker_hours),
            Row(f"{prefix} turns", outcome.num_turns, "times"),
        ]
    if is_large:
        return rows
    mean = max(round(budget * ours.worker_hours / static.worker_hours), 2)
    best, equal = best_static(arrivals, mean)
    name = f"{name}, twophase: good answers for its worker-hours"
    peer = f"static {best}P+{mean - best}D"
    return [*rows, Row(name, ours.attainment, "share", peer, equal.attainment)]


def speed(budget: int) -> Row:
    """CPU seconds for SPEED_REQUESTS requests, autoscaled; the limit is a minute."""
    config = config_of(budget // 2, budget - budget // 2, budget)
    arrivals = scaled(poisson(budget / 5, 3600.0, 512, 128), num_requests=SPEED_REQUESTS)
    started_s = time.process_time()
    play(config, arrivals, Autoscaled(config), who="twophase")
    seconds = time.process_time() - started_s
    name = f"{SPEED_REQUESTS} requests simulated, {budget} workers"
    return Row(name, seconds, "CPU s", "limit", 60.0)


def main() -> None:
    """Play all loads and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="Azure CSV or Mooncake JSON lines.")
    parser.add_argument("--workers", type=int, nargs="+", default=[10])
    parser.add_argument("--requests", type=int, default=6000, help="Of each load, on ten workers.")
    words = parser.parse_args()
    loads = []
    for path in words.traces:
        trace = read_trace(path, block_size=BLOCK_TOKENS)
        rate = RATES.get(path.stem, 1.0)
        loads.append(Load(path.stem, scaled(trace, rate=rate, num_requests=words.requests)))
    turn = Load("turning load", turning(1800.0))
    rows = []
    for budget in words.workers:
        for load in [turn, *loads] if budget <= SEARCHED_WORKERS else loads:
            rows += compare(load, budget)
        rows.append(speed(budget))
    print_report("The autoscaler on a manual clock", rows)


if __name__ == "__main__":
    main()
