"""How long a stream stands still when its decode worker is killed, and what it waits for.

One prefill and two decode workers run the model in float32; a lost worker is started again. In
each round streams begin anew, one of the decode workers that serve them is killed with SIGKILL, in
turn, and each of its streams tells:

    kill .. noticed    detection: until the router's log says that the attempt failed
    noticed .. placed  wait: until the next workers were chosen, as the phases of the answer say
    placed .. token    recompute: until the next token is here, which prefill makes once it has read
                       prompt and emitted tokens again; its parts are phases of that attempt. That
                       the KV cache moves then, costs the token after it

Kills are counted, not streams: worst and median are over all streams of all kills.
"""

import argparse
import asyncio
import datetime
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import StreamLog, random_prompt, stream
from bench.parity import wait_until_ready
from bench.report import Row, print_report
from core.config import ClusterConfig, DecodeConfig, EngineConfig, PrefillConfig
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.request import WorkerName
from core.settings.router import RouterConfig
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from twophase.client import AsyncClient

NUM_STREAMS = 4
NUM_PROMPT_TOKENS = 256
MAX_TOKENS = 48
# So many tokens of each are there before the kill.
NUM_TOKENS_BEFORE = 8
REQUEST_TIMEOUT_S = 120.0
BACK_S = 120.0
POLL_S = 0.02
_FAILED = re.compile(r"^(\S+ \S+) WARNING twophase\.router request (\S+): an attempt failed")


@dataclass(frozen=True, slots=True)
class Stall:
    """One stream across one kill; seconds from the kill on, parts in the order of the module."""

    detection_s: float
    wait_s: float
    recompute_s: float
    reserve_s: float
    queue_s: float
    prefill_s: float

    @property
    def rest_s(self) -> float:
        """What no phase of the recompute covers: messages on their way, and a busy machine."""
        return self.recompute_s - self.reserve_s - self.queue_s - self.prefill_s

    @property
    def total_s(self) -> float:
        """From the kill to the next token."""
        return self.detection_s + self.wait_s + self.recompute_s


def stall_of(log: StreamLog, killed_s: float, noticed_s: float) -> Stall:
    """What the kill did to a stream that went on; times are of the monotonic clock."""
    assert log.completion is not None
    phases = log.completion.phases
    placed_s = log.sent_s + phases.tokenize_s + phases.place_s + phases.recovery_s
    # The clocks of client and router are one, but a message takes its time from one to the other.
    placed_s = max(placed_s, noticed_s)
    token_s = next(arrival.at_s for arrival in log.arrivals if arrival.at_s > placed_s)
    return Stall(
        detection_s=noticed_s - killed_s,
        wait_s=placed_s - noticed_s,
        recompute_s=token_s - placed_s,
        reserve_s=phases.reserve_s,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
    )


def failed_at(lines: Sequence[str], offset_s: float) -> dict[str, float]:
    """When the router noticed first that an attempt failed, by request, from lines of its log.

    offset_s is what the monotonic clock is behind the wall clock.
    """
    noticed: dict[str, float] = {}
    for line in lines:
        if found := _FAILED.match(line):
            at = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone()
            noticed.setdefault(found[2], at.timestamp() - offset_s)
    return noticed


async def one_kill(
    client: AsyncClient, router_log: Path, prompts: Sequence[Sequence[int]], number: int
) -> list[Stall]:
    """Start a stream for each prompt, kill a worker in the middle, in turn; its streams."""
    logs = [StreamLog() for _ in prompts]
    offset_s = time.time() - time.monotonic()
    num_lines = len(router_log.read_text(encoding="utf-8").splitlines())
    async with asyncio.TaskGroup() as tasks:
        for log, prompt in zip(logs, prompts, strict=True):
            going = stream(client, prompt, log, max_tokens=MAX_TOKENS, timeout_s=REQUEST_TIMEOUT_S)
            tasks.create_task(going)
        while min(log.num_tokens for log in logs) < NUM_TOKENS_BEFORE:
            await asyncio.sleep(POLL_S)
        serving = sorted({request.decode_worker for request in await client.admin.requests()})
        killed_s = await kill(client, serving[number % len(serving)])
    noticed = failed_at(router_log.read_text(encoding="utf-8").splitlines()[num_lines:], offset_s)
    done = [(log, log.completion) for log in logs if log.completion]
    return [
        stall_of(log, killed_s, noticed[completion.request_id])
        for log, completion in done
        if len(completion.failures) == 1 and completion.request_id in noticed
    ]


async def kill(client: AsyncClient, name: WorkerName) -> float:
    """Kill a worker; when that was."""
    pids = {worker.name: worker.pid for worker in (await client.status()).workers}
    killed_s = time.monotonic()
    os.kill(pids[name], signal.SIGKILL)
    return killed_s


async def until_all_are_back(client: AsyncClient, num_workers: int) -> None:
    """Return once every worker serves again; TimeoutError after BACK_S."""
    async with asyncio.timeout(BACK_S):
        while len((await client.status()).workers) < num_workers:
            await asyncio.sleep(POLL_S)
    await wait_until_ready(client)


async def measure(address: str, router_log: Path, *, num_kills: int, seed: int) -> list[Stall]:
    """Stalls of all streams of `num_kills` kills."""
    generator, stalls = random.Random(seed), []
    async with AsyncClient(address) as client:
        await wait_until_ready(client)
        num_workers = len((await client.status()).workers)
        vocab_size = (await client.model()).vocab_size
        for number in range(num_kills):
            prompts = [
                random_prompt(generator, NUM_PROMPT_TOKENS, vocab_size) for _ in range(NUM_STREAMS)
            ]
            stalls += await one_kill(client, router_log, prompts, number)
            await until_all_are_back(client, num_workers)
    return stalls


def rows(stalls: Sequence[Stall]) -> list[Row]:
    """Median and worst of the whole, median and share of the parts."""
    total_s = sum(stall.total_s for stall in stalls)
    found = [
        Row("kill to next token, median", _median_ms([s.total_s for s in stalls]), "ms"),
        Row("kill to next token, worst", max(s.total_s for s in stalls) * 1e3, "ms"),
    ]
    for name, parts in (
        ("detection", [s.detection_s for s in stalls]),
        ("wait for workers", [s.wait_s for s in stalls]),
        ("recompute", [s.recompute_s for s in stalls]),
        ("recompute: reserve blocks", [s.reserve_s for s in stalls]),
        ("recompute: queue at prefill", [s.queue_s for s in stalls]),
        ("recompute: prefill", [s.prefill_s for s in stalls]),
        ("recompute: rest", [s.rest_s for s in stalls]),
    ):
        found.append(Row(f"{name}, median", _median_ms(parts), "ms"))
        found.append(Row(f"{name}, share", sum(parts) / total_s * 100, "%"))
    return found


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(prog="bench.recovery", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or directory")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    options = parser.parse_args(arguments)
    config = ClusterConfig(
        model=str(fetch_model(options.model)),
        engine=EngineConfig(dtype=Dtype.FLOAT32),
        prefill=PrefillConfig(),
        decode=DecodeConfig(replicas=2),
        router=RouterConfig(port=0, http_port=None),
    )
    with local_cluster(config, tell=lambda line: None, replace_lost=True) as cluster:
        log = cluster.log_directory / "router.log"
        measuring = measure(cluster.address, log, num_kills=options.kills, seed=options.seed)
        stalls = asyncio.run(measuring)
    facts = {
        "num_kills": options.kills,
        "num_streams": len(stalls),
        # Six processes want a core each: on a machine that is not theirs alone, they queue.
        "load_average_5_min": os.getloadavg()[1],
        "num_cores": len(os.sched_getaffinity(0)),
    }
    print_report(f"Recovery: {len(stalls)} streams, {options.kills} kills", rows(stalls), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
