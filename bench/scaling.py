"""Real pools under a load that turns: `make bench-scaling`.

A cluster in child processes begins with one worker in each pool and may have three. The first half
of the load is long prompts with short answers, the second short prompts with long answers, both
faster than one worker can do, as was measured just before. Two rounds with the same load:

- as it is: prefill grows first, then decode by a worker that changes its role, for the budget is
  spent; no stream fails
- with links that carry next to nothing (`chaos.link_bytes_per_s`): neither pool grows. That load
  cannot be worked off: streams that still run at the end of a half are cut

Every decision that changed something is printed in words; the sizes are drawn (`--figure`). On few
cores more workers do not make more of them: directions are measured here, not speed.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import StreamLog, random_prompt, stream
from bench.machine import CpuMeter
from bench.report import Row, print_report
from bench.scaling_figure import draw
from bench.simulate.report import sparkline
from core.config import ClusterConfig, load_config
from core.errors import TwophaseError
from core.model_path import DEFAULT_MODEL
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from deploy.own_client import wait_until_ready
from twophase.client import AsyncClient

READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 300.0
NUM_MEASURED = 5
NUM_SLOTS = 4
WORKERS = (
    *("engine.dtype=bfloat16", "router.port=0", "router.http_port=null", "router.max_queue_s=300"),
    *("prefill.kv_cache=200MiB", "decode.kv_cache=300MiB"),
    f"decode.max_num_sequences={NUM_SLOTS}",
)
SETTINGS = (
    *WORKERS,
    "scaling.prefill={max_replicas: 2, target_wait_s: 0.5}",
    "scaling.decode={max_replicas: 2, target_wait_s: 0.5, target_step_s: 60.0}",
    *("scaling.budget=3", "scaling.interval_s=2", "scaling.grow_after_s=6"),
    *("scaling.shrink_after_s=600", "scaling.cooldown_s=30"),
)
THROTTLE = ("chaos.enabled=true", "chaos.link_bytes_per_s=150000")

Record = dict[str, Any]  # Any: as Record.to_json writes it


@dataclass(frozen=True, slots=True)
class Half:
    """One half of the load: `load` times what one worker does, which does num_at_once at once."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_at_once: int
    load: float


HALVES = (
    Half("long prompts, short answers", 1200, 4, 1, 1.3),
    Half("short prompts, long answers", 32, 160, NUM_SLOTS, 2.0),
)
# Requests a second in each half.
Rates = dict[Half, float]


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of the load: streams that ended well, that were cut, and why others failed.

    turned_s is when its second half began, as the records tell times.
    """

    num_good: int
    num_cut: int
    errors: tuple[str, ...]
    turned_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round: what came of the load, every decision, and cores that other processes used."""

    seen: Seen
    records: tuple[Record, ...]
    other_cores: float

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Workers of each pool after each decision."""
        pools = [pool for record in self.records for pool in record["pools"]]
        roles = ("prefill", "decode")
        return {role: [pool["after"] for pool in pools if pool["role"] == role] for role in roles}

    @property
    def served(self) -> dict[str, list[int]]:
        """Workers of each pool that served at each decision."""
        pools = [pool for record in self.records for pool in record["pools"]]
        roles = ("prefill", "decode")
        return {r: [p["view"]["num_serving"] for p in pools if p["role"] == r] for r in roles}

    @property
    def num_role_changes(self) -> int:
        """Workers that left one pool to start again in the other."""
        actions = [action for record in self.records for action in record["actions"]]
        changes = [action["ChangeRole"] for action in actions if "ChangeRole" in action]
        return sum(len(change["names"]) for change in changes)


async def rates_of(address: str) -> Rates:
    """How often requests of each half come: `load` times what workers were just seen to do."""
    rates = {}
    async with AsyncClient(address) as client:
        sender = Sender(client, (await client.model()).vocab_size)
        for half in HALVES:
            times_s = []
            for _ in range(NUM_MEASURED):
                began_s = time.monotonic()
                await asyncio.gather(*(sender.send(half) for _ in range(half.num_at_once)))
                times_s.append(time.monotonic() - began_s)
            # The fastest: a machine that was slow just now may be faster when the load comes.
            rates[half] = half.load * half.num_at_once / min(times_s)
    return rates


@dataclass(slots=True)
class Sender:
    """Sends requests of either half; the same prompts in the same order each time."""

    client: AsyncClient
    vocab_size: int
    draw_token: random.Random = field(default_factory=lambda: random.Random(1))

    async def send(self, half: Half) -> None:
        """One request, to its end."""
        await stream(
            self.client,
            random_prompt(self.draw_token, half.num_prompt_tokens, self.vocab_size),
            StreamLog(),
            max_tokens=half.num_output_tokens,
            timeout_s=REQUEST_TIMEOUT_S,
        )


async def send(
    client: AsyncClient, vocab_size: int, rates: Rates, seconds: float, *, is_cut: bool
) -> Seen:
    """Both halves, `seconds` each; the streams of each are waited for, or cut, at its end."""
    sender, turned_s = Sender(client, vocab_size), 0.0
    ended: list[BaseException | None] = []
    for half, rate in rates.items():
        turned_s, streams = time.monotonic(), []
        for _ in range(round(seconds * rate)):
            streams.append(asyncio.ensure_future(sender.send(half)))
            await asyncio.sleep(1 / rate)
        for running in streams:
            if is_cut:
                running.cancel()
        ended += await asyncio.gather(*streams, return_exceptions=True)
    return _seen(ended, turned_s)


def _seen(ended: Sequence[BaseException | None], turned_s: float) -> Seen:
    errors = [str(error) for error in ended if isinstance(error, TwophaseError)]
    num_cut = sum(isinstance(error, asyncio.CancelledError) for error in ended)
    num_good = ended.count(None)
    if num_good + num_cut + len(errors) < len(ended):
        kinds = (TwophaseError, asyncio.CancelledError, type(None))
        raise next(e for e in ended if e is not None and not isinstance(e, kinds))
    return Seen(num_good, num_cut, tuple(errors), turned_s)


def measured_rates(config: ClusterConfig) -> Rates:
    """What to send, by a cluster of one worker in each pool."""
    with local_cluster(config, tell=lambda line: None) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)
        return asyncio.run(rates_of(cluster.address))


def play(config: ClusterConfig, rates: Rates, seconds: float, *, is_cut: bool) -> Round:
    """Run a cluster under the load."""
    assert config.scaling is not None and config.scaling.log is not None
    log = config.scaling.log
    with local_cluster(config, tell=lambda line: None, replace_lost=True) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)

        async def run() -> Seen:
            async with AsyncClient(cluster.address) as client:
                vocab_size = (await client.model()).vocab_size
                log.write_text("")  # what was decided while the first token went through is no load
                return await send(client, vocab_size, rates, seconds, is_cut=is_cut)

        meter = CpuMeter()
        seen, other_cores = asyncio.run(run()), meter.read().other_cores
        records = tuple(json.loads(line) for line in log.read_text().splitlines())
    return Round(seen, records, other_cores)


def facts_of(free: Round, throttled: Round) -> dict[str, bool]:
    """What the bench is to show, and whether it did."""
    sizes, actual = free.sizes, free.served
    grown = {
        role: next((n for n, size in enumerate(sizes[role]) if size > 1), None) for role in sizes
    }
    first, second = grown["prefill"], grown["decode"]
    is_in_order = first is not None and second is not None and first < second
    has_changed = free.num_role_changes > 0 and actual["decode"][-1] > 1
    return {
        "prefill grew": first is not None,
        "decode grew after it": is_in_order,
        "by a worker that changed its role": has_changed,
        "no stream failed": not free.seen.errors,
        "with a throttled link neither grew": all(max(s) == 1 for s in throttled.sizes.values()),
    }


def rows_of(name: str, played: Round) -> list[Row]:
    """The numbers of one round."""
    seen, sizes = played.seen, played.sizes
    return [
        Row(f"{name}: most prefill workers", max(sizes["prefill"]), "workers"),
        Row(f"{name}: most decode workers", max(sizes["decode"]), "workers"),
        Row(f"{name}: prefill workers at the end", played.served["prefill"][-1], "workers"),
        Row(f"{name}: decode workers at the end", played.served["decode"][-1], "workers"),
        Row(f"{name}: workers that changed their role", played.num_role_changes, "workers"),
        Row(f"{name}: streams that ended well", seen.num_good, "streams"),
        Row(f"{name}: streams that failed", len(seen.errors), "streams"),
        Row(f"{name}: streams that were cut at the end", seen.num_cut, "streams"),
    ]


def tell(out: Console, name: str, played: Round) -> None:
    """Sizes over time, and every change in words."""
    out.print(f"[{name}]")
    for pool, numbers in played.sizes.items():
        out.print(f"{pool:8}{sparkline(numbers)} {min(numbers)} to {max(numbers)} workers")
    for record in (*(r for r in played.records if r["actions"]), played.records[-1]):
        seconds = record["now_s"] - played.records[0]["now_s"]
        out.print(f"{seconds:6.0f} s  {record['sentence']}")
    for error in sorted(set(played.seen.errors)):
        out.print(f"failed: {error}")


def main() -> None:
    """Measure and print: sizes over time, every change in words, what was shown, and the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="Of each half.")
    parser.add_argument("--figure", type=Path, help="PNG to write.")
    arguments = parser.parse_args()
    out = Console(soft_wrap=True, highlight=False, markup=False)
    rounds: dict[str, Round] = {}
    with tempfile.TemporaryDirectory(prefix="twophase-") as directory:
        model = f"model={fetch_model(DEFAULT_MODEL)}"
        rates = measured_rates(load_config(None, [model, *WORKERS]))
        for half, rate in rates.items():
            out.print(f"{half.name}: {rate:.2f} requests a second, {half.load:g} times one worker")
        for name, more in (("links as they are", ()), ("throttled links", THROTTLE)):
            log = Path(directory) / f"{len(rounds)}.jsonl"
            config = load_config(None, [model, *SETTINGS, *more, f"scaling.log={log}"])
            rounds[name] = play(config, rates, arguments.seconds, is_cut=bool(more))
            tell(out, name, rounds[name])
    if arguments.figure is not None:
        draw({n: (r.records, r.seen.turned_s) for n, r in rounds.items()}, arguments.figure)
    for fact, is_shown in facts_of(*rounds.values()).items():
        out.print(f"{'shown' if is_shown else 'NOT SHOWN'}: {fact}")
    rows = [row for name, played in rounds.items() for row in rows_of(name, played)]
    cores = {name: played.other_cores for name, played in rounds.items()}
    print_report("Pools under a load that turns", rows, {"other_cores": cores})


if __name__ == "__main__":
    main()
