"""How long a stream stands still when its decode worker is stopped in order, both ways.

One prefill and two decode workers run the model in float32; a stopped worker is started again. In
each round streams with long prompts begin anew and a decode worker that serves some of them is sent
SIGTERM. Of each stream that went on elsewhere the longest gap between two tokens after that is its
pause: once with `router.on_drain: migrate`, once with `recompute`. Prompts are new in each round,
but recompute finds them in the prefill worker's prefix cache, as it mostly does in production, so a
second row of it is measured with a cache that is too small to keep them.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

from pydantic import ByteSize

from bench.load import StreamLog, random_prompt, stream
from bench.parity import wait_until_ready
from bench.recovery import BACK_S
from bench.report import Row, print_report
from core.config import ClusterConfig, DecodeConfig, EngineConfig, PrefillConfig
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.settings.router import OnDrain, RouterConfig
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from twophase.client import AsyncClient

NUM_STREAMS = 2
NUM_PROMPT_TOKENS = 1500
MAX_TOKENS = 64
NUM_TOKENS_BEFORE = 8
REQUEST_TIMEOUT_S = 240.0
POLL_S = 0.02
# Holds the prompts of a round, or one prompt only.
LARGE_CACHE, SMALL_CACHE = ByteSize(512 << 20), ByteSize(80 << 20)


def pauses_of(logs: Sequence[StreamLog], stopped_s: float) -> list[float]:
    """The longest gap after the signal of each stream that went on at another worker."""
    moved = [log for log in logs if log.completion and log.completion.num_resumed_tokens > 0]
    return [
        max(gap.seconds for gap in log.gaps() if gap.ended_s > stopped_s)
        for log in moved
        if any(gap.ended_s > stopped_s for gap in log.gaps())
    ]


async def one_stop(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Start a stream for each prompt and stop the worker that serves most; the pauses."""
    logs = [StreamLog() for _ in prompts]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for log, prompt in zip(logs, prompts, strict=True):
            going = stream(client, prompt, log, max_tokens=MAX_TOKENS, timeout_s=REQUEST_TIMEOUT_S)
            tasks.create_task(going)
        while min(log.num_tokens for log in logs) < NUM_TOKENS_BEFORE:
            await asyncio.sleep(POLL_S)
        serving = Counter(request.decode_worker for request in await client.admin.requests())
        (name, _), *_ = serving.most_common()
        pids = {worker.name: worker.pid for worker in (await client.status()).workers}
        stopped_s = loop.time()
        os.kill(pids[name], signal.SIGTERM)
    return pauses_of(logs, stopped_s)


async def until_all_serve(client: AsyncClient, num_workers: int) -> None:
    """Return once the stopped worker is back; TimeoutError after BACK_S."""
    async with asyncio.timeout(BACK_S):
        while sum(not w.is_draining for w in (await client.status()).workers) < num_workers:
            await asyncio.sleep(POLL_S)
    await wait_until_ready(client)


async def measure(address: str, *, num_stops: int, seed: int) -> list[float]:
    """Pauses of all streams of `num_stops` stops."""
    generator, pauses = random.Random(seed), []
    async with AsyncClient(address) as client:
        await wait_until_ready(client)
        num_workers = len((await client.status()).workers)
        vocab_size = (await client.model()).vocab_size
        for _ in range(num_stops):
            prompts = [
                random_prompt(generator, NUM_PROMPT_TOKENS, vocab_size) for _ in range(NUM_STREAMS)
            ]
            pauses += await one_stop(client, prompts)
            await until_all_serve(client, num_workers)
    return pauses


def cluster_of(model: str, on_drain: OnDrain, prefill_cache: ByteSize) -> ClusterConfig:
    """The cluster that is measured."""
    return ClusterConfig(
        model=model,
        engine=EngineConfig(dtype=Dtype.FLOAT32),
        prefill=PrefillConfig(kv_cache=prefill_cache),
        decode=DecodeConfig(replicas=2, kv_cache=LARGE_CACHE),
        router=RouterConfig(port=0, http_port=None, on_drain=on_drain),
    )


def rows(name: str, pauses: Sequence[float]) -> list[Row]:
    """Median and worst."""
    return [
        Row(f"{name}, median", statistics.median(pauses) * 1e3, "ms"),
        Row(f"{name}, worst", max(pauses) * 1e3, "ms"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(prog="bench.drain", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or directory")
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    options = parser.parse_args(arguments)
    model = str(fetch_model(options.model))
    found: list[Row] = []
    facts: dict[str, float] = {}
    for name, on_drain, prefill_cache in (
        ("migrate", OnDrain.MIGRATE, LARGE_CACHE),
        ("recompute, prompt cached at prefill", OnDrain.RECOMPUTE, LARGE_CACHE),
        ("recompute, not cached", OnDrain.RECOMPUTE, SMALL_CACHE),
    ):
        config = cluster_of(model, on_drain, prefill_cache)
        with local_cluster(config, tell=lambda line: None, replace_lost=True) as cluster:
            measuring = measure(cluster.address, num_stops=options.stops, seed=options.seed)
            pauses = asyncio.run(measuring)
        found += rows(name, pauses)
        facts[f"num_streams, {name}"] = len(pauses)
        facts[f"load_average_1_min, {name}"] = os.getloadavg()[0]
    facts["num_cores"] = len(os.sched_getaffinity(0))
    print_report(f"Drain: histories of {NUM_PROMPT_TOKENS} tokens", found, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
