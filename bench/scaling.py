"""Real pools under a load that turns: `make bench-scaling`.

A cluster in child processes begins with one worker in each pool and may have three. The first half
of the load is long prompts with short answers, the second short prompts with long answers, both
faster than one worker can do. What it shows: the prefill pool grows first, then a worker changes
its role under the spent budget, and no stream fails. Every decision is printed in words.

On few cores more workers do not make more of them: directions are measured here, not speed.
"""

import argparse
import asyncio
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import StreamLog, random_prompt, stream
from bench.machine import CpuMeter
from bench.report import Row, print_report
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
SETTINGS = (
    "engine.dtype=bfloat16",
    "router.port=0",
    "router.http_port=null",
    "router.max_queue_s=300",
    *("prefill.kv_cache=200MiB", "decode.kv_cache=200MiB", "decode.max_num_sequences=4"),
    "scaling.prefill={max_replicas: 2, target_wait_s: 0.5}",
    "scaling.decode={max_replicas: 2, target_wait_s: 0.5, target_step_s: 5.0}",
    *("scaling.budget=3", "scaling.interval_s=2", "scaling.grow_after_s=6"),
    *("scaling.shrink_after_s=600", "scaling.cooldown_s=10"),
)


@dataclass(frozen=True, slots=True)
class Half:
    """One half of the load."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float


HALVES = (
    Half("long prompts, short answers", 1200, 4, 1.0),
    Half("short prompts, long answers", 32, 160, 0.7),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of the load: streams that ended well, and what the others ended with."""

    num_good: int
    errors: tuple[str, ...]


async def send(address: str, vocab_size: int, seconds: float) -> list[Seen]:
    """Both halves, one after the other, `seconds` each; all streams are waited for."""
    draw, seen = random.Random(1), []
    async with AsyncClient(address) as client:
        for half in HALVES:
            streams = []
            for _ in range(round(seconds * half.requests_per_s)):
                prompt = random_prompt(draw, half.num_prompt_tokens, vocab_size)
                one = stream(
                    client,
                    prompt,
                    StreamLog(),
                    max_tokens=half.num_output_tokens,
                    timeout_s=REQUEST_TIMEOUT_S,
                )
                streams.append(asyncio.ensure_future(one))
                await asyncio.sleep(1 / half.requests_per_s)
            ended = await asyncio.gather(*streams, return_exceptions=True)
            errors = tuple(str(e) for e in ended if isinstance(e, TwophaseError))
            bugs = [e for e in ended if isinstance(e, BaseException)]
            if len(bugs) > len(errors):
                raise next(e for e in bugs if not isinstance(e, TwophaseError))
            seen.append(Seen(len(ended) - len(errors), errors))
    return seen


def sizes_of(records: list[dict[str, Any]]) -> dict[str, list[int]]:  # Any: as Record.to_json
    """Workers of each pool after each decision."""
    sizes: dict[str, list[int]] = {"prefill": [], "decode": []}
    for record in records:
        for pool in record["pools"]:
            sizes[pool["role"]].append(pool["after"])
    return sizes


def measure(config: ClusterConfig, log: Path, seconds: float) -> tuple[list[Seen], float]:
    """Run the cluster and the load; what came of it, and cores that other processes used."""
    with local_cluster(config, tell=lambda line: None, replace_lost=True) as cluster:
        wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)

        async def run() -> list[Seen]:
            async with AsyncClient(cluster.address) as client:
                vocab_size = (await client.model()).vocab_size
            log.write_text("")  # what was decided while the first token went through is no load
            return await send(cluster.address, vocab_size, seconds)

        meter = CpuMeter()
        return asyncio.run(run()), meter.read().other_cores


def main() -> None:
    """Measure and print: sizes over time, every change in words, and the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="Of each half.")
    seconds = parser.parse_args().seconds
    out = Console(soft_wrap=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="twophase-") as directory:
        log = Path(directory) / "decisions.jsonl"
        words = [f"model={fetch_model(DEFAULT_MODEL)}", *SETTINGS, f"scaling.log={log}"]
        seen, other_cores = measure(load_config(None, words), log, seconds)
        records = [json.loads(line) for line in log.read_text().splitlines()]
    sizes = sizes_of(records)
    for name, numbers in sizes.items():
        out.print(f"{name:8}{sparkline(numbers)} {min(numbers)} to {max(numbers)} workers")
    for record in records:
        if record["actions"]:
            out.print(f"{record['now_s'] - records[0]['now_s']:6.0f} s  {record['sentence']}")
    rows = [
        Row("most prefill workers", max(sizes["prefill"]), "workers"),
        Row("prefill workers at the end", sizes["prefill"][-1], "workers"),
        Row("decode workers at the end", sizes["decode"][-1], "workers"),
        *(
            Row(f"{half.name}: streams that failed", len(each.errors), "streams")
            for half, each in zip(HALVES, seen, strict=True)
        ),
    ]
    print_report("Pools under a load that turns", rows, {"other_cores": other_cores})


if __name__ == "__main__":
    main()
