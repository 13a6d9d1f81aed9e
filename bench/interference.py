"""What one long prompt does to running streams, in each mode, on the same two cores.

`python -m bench.interference`: eight streams of short prompts run; when each has ARRIVAL_TOKENS
tokens, one long prompt arrives. The setups take turns, every round with prompts of its own, on
clusters that were started and warmed up before; the numbers (`interference_result` defines them)
are medians over the rounds, taken from arrivals at the client (`load`).

The servers are child processes (`deploy.local_cluster`). Compute threads are pinned; router,
client and I/O threads run wherever there is room on the same cores. A setup's name ends with
replicas x threads; 1+1 is one prefill and one decode worker, each with a core of its own.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from bench.interference_result import MEASURES, Observation, Peer, Result, median_of, numbers_of
from bench.load import StreamLog, random_prompt, stream
from bench.machine import CpuMeter, read_gb_per_s, spin
from bench.report import print_report
from core.config import ClusterConfig, DecodeConfig, EngineConfig, Mode, PrefillConfig, RouterConfig
from core.errors import PeerLost
from core.layout import Dtype
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from twophase.client import AsyncClient

CORES = (0, 1)
NUM_STREAMS = 8
STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 64, 200
LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS = 1800, 16
ARRIVAL_TOKENS = 60
WARM_UP_TOKENS = 24
KV_CACHE = ByteSize(320 << 20)
READY_TIMEOUT_S, READY_POLL_S = 60.0, 0.2
REQUEST_TIMEOUT_S = 120.0
SPIN_S = 0.5
NOISY_CORES = 0.1
TABLE_WIDTH = 100

# vLLM's CPU build 0.32, same model, bfloat16, same scenario, on two cores with AVX-512 and no AMX
# that read 27 GB/s, 2026-11-30: its own P/D with one engine on each core, a budget of 256 tokens,
# and as it comes.
VLLM_SPLIT = Peer("vLLM P/D over NIXL", 73, 96, 95, 7.4, 100)
VLLM_SMALL_BUDGET = Peer("vLLM, budget 256", 26, 320, 345, 1.97, 228)
VLLM_DEFAULT = Peer("vLLM, default", 27, 42, 1774, 1.80, 218)


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to use the two cores."""

    name: str
    mode: Mode
    replicas: int
    peer: Peer | None = None

    def config(self, *, model: str, chunk_tokens: int) -> ClusterConfig:
        """The cluster of this setup; chunk_tokens is the budget of a step in mode chunked."""
        is_split = self.mode is Mode.DISAGGREGATED
        cores = CORES[1:] if is_split else CORES
        budget = {"max_batch_tokens": chunk_tokens} if self.mode is Mode.CHUNKED else {}
        return ClusterConfig(
            model=model,
            mode=self.mode,
            engine=EngineConfig(dtype=Dtype.BFLOAT16),
            prefill=PrefillConfig(cores=CORES[:1], kv_cache=KV_CACHE) if is_split else None,
            decode=DecodeConfig(
                replicas=self.replicas,
                num_threads=len(cores) // self.replicas,
                cores=cores,
                kv_cache=KV_CACHE,
                **budget,
            ),
            router=RouterConfig(port=0),
        )


SETUPS = (
    Setup("disaggregated 1+1", Mode.DISAGGREGATED, 1, VLLM_SPLIT),
    Setup("chunked 2x1", Mode.CHUNKED, 2),
    Setup("chunked 1x2", Mode.CHUNKED, 1, VLLM_SMALL_BUDGET),
    Setup("colocated 2x1", Mode.COLOCATED, 2),
    Setup("colocated 1x2", Mode.COLOCATED, 1, VLLM_DEFAULT),
)


async def observe(client: AsyncClient, generator: random.Random, vocab_size: int) -> Observation:
    """One round: streams, and the long prompt in their middle."""
    logs = tuple(StreamLog() for _ in range(NUM_STREAMS))
    long_log = StreamLog()
    is_time = asyncio.Event()

    def on_arrival() -> None:
        if min(log.num_tokens for log in logs) >= ARRIVAL_TOKENS:
            is_time.set()

    def send(log: StreamLog, num_prompt_tokens: int, max_tokens: int) -> None:
        prompt = random_prompt(generator, num_prompt_tokens, vocab_size)
        answer = stream(
            client,
            prompt,
            log,
            max_tokens=max_tokens,
            timeout_s=REQUEST_TIMEOUT_S,
            on_arrival=on_arrival,
        )
        tasks.create_task(answer)

    meter = CpuMeter()
    async with asyncio.TaskGroup() as tasks:
        for log in logs:
            send(log, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS)
        await is_time.wait()
        send(long_log, LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS)
    return Observation(logs, long_log, meter.read())


async def warm_up(client: AsyncClient, generator: random.Random, num_replicas: int) -> int:
    """Let every worker see both shapes once; returns the model's vocabulary size.

    Raises:
        PeerLost: the cluster is not ready within READY_TIMEOUT_S.
    """
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not (await client.status()).is_ready:
                await asyncio.sleep(READY_POLL_S)
    except TimeoutError as error:
        raise PeerLost("cluster", f"not ready within {READY_TIMEOUT_S:g} s") from error
    vocab_size = (await client.model()).vocab_size
    lengths = [LONG_PROMPT_TOKENS] * num_replicas + [STREAM_PROMPT_TOKENS] * NUM_STREAMS
    async with asyncio.TaskGroup() as tasks:
        for length in lengths:
            prompt = random_prompt(generator, length, vocab_size)
            answer = stream(
                client,
                prompt,
                StreamLog(),
                max_tokens=WARM_UP_TOKENS,
                timeout_s=REQUEST_TIMEOUT_S,
            )
            tasks.create_task(answer)
    return vocab_size


async def measure(
    addresses: Sequence[str], setups: Sequence[Setup], *, num_rounds: int, seed: int
) -> list[list[Observation]]:
    """Warm all clusters up, then let them take turns; one list of rounds per setup."""
    generator = random.Random(seed)
    seen: list[list[Observation]] = [[] for _ in setups]
    for number in range(num_rounds + 1):
        for setup, address, rounds in zip(setups, addresses, seen, strict=True):
            async with AsyncClient(address) as client:
                if number == 0:
                    await warm_up(client, generator, setup.replicas)
                    continue
                vocab_size = (await client.model()).vocab_size
                rounds.append(await observe(client, generator, vocab_size))
    return seen


def overview(results: Sequence[Result]) -> Table:
    """Measures down, setups across."""
    table = Table("medians of rounds", title="Eight streams and one long prompt on two cores")
    for result in results:
        table.add_column(result.name.replace(" ", "\n", 1), justify="right")
    found = [median_of(result.rounds) for result in results]
    for measure in MEASURES:
        values = (getattr(numbers, measure.field) for numbers in found)
        label = f"{measure.name}, {measure.unit}"
        table.add_row(label, *(f"{value:.{measure.num_digits}f}" for value in values))
    return table


def core_line(core: int) -> str:
    """How quiet and how fast one core is right now."""
    spun, gb_per_s = spin(core, SPIN_S), read_gb_per_s(core)
    return (
        f"core {core}: {spun.stolen_share:.1%} of {SPIN_S:g} s went to others, longest "
        f"{spun.longest_ms:.1f} ms; it reads {gb_per_s:.1f} GB/s"
    )


def remarks(seen: dict[str, list[Observation]]) -> list[str]:
    """What a reader must know before believing the numbers."""
    lines = []
    for name, rounds in seen.items():
        others = [r.cpu.other_cores + r.cpu.stolen_cores for r in rounds]
        if max(others) > NOISY_CORES:
            shown = ", ".join(f"{cores:.2f}" for cores in others)
            lines.append(f"noisy: {name}: other work took {shown} cores of {len(CORES)} by round")
        if not all(r.is_covered for r in rounds):
            lines.append(f"short: {name}: streams ended before the long prompt was running")
        together = [a for r in rounds for log in r.streams for a in log.arrivals]
        num_joined = sum(a.num_tokens > 1 for a in together)
        if num_joined:
            lines.append(
                f"joined: {name}: {num_joined} of {len(together)} messages carried more than one "
                "token; the later ones count as gaps of 0"
            )
    return lines


def run(
    setups: Sequence[Setup], *, num_rounds: int, seed: int, chunk_tokens: int, console: Console
) -> dict[str, list[Observation]]:
    """Start all clusters, measure, stop them; rounds by the setup's name."""
    model = str(fetch_model("smollm2-135m-instruct"))
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting clusters"))
        addresses = []
        for setup in setups:
            config = setup.config(model=model, chunk_tokens=chunk_tokens)
            cluster = stack.enter_context(local_cluster(config, tell=status.update))
            addresses.append(cluster.address)
        status.update("measuring")
        seen = asyncio.run(measure(addresses, setups, num_rounds=num_rounds, seed=seed))
    return {setup.name: rounds for setup, rounds in zip(setups, seen, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(prog="bench.interference", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per setup (median)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="step budget, mode chunked")
    parser.add_argument("--only", default="", help="setups whose name holds this")
    parser.add_argument("--figure", type=Path, help="write gaps over time to this .png")
    options = parser.parse_args(arguments)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    for core in CORES:
        console.print(core_line(core))
    setups = [setup for setup in SETUPS if options.only in setup.name]
    seen = run(
        setups,
        num_rounds=options.rounds,
        seed=options.seed,
        chunk_tokens=options.chunk_tokens,
        console=console,
    )
    results = [
        Result(
            setup.name,
            tuple(numbers_of(observation) for observation in seen[setup.name]),
            setup.peer,
            has_limits=setup.mode is Mode.DISAGGREGATED,
        )
        for setup in setups
    ]
    if options.figure is not None:
        from bench.interference_figure import draw

        draw({name: rounds[0] for name, rounds in seen.items()}, options.figure)
    console.print(overview(results))
    for line in remarks(seen):
        console.print(line)
    print_report("Interference", [row for result in results for row in result.rows()])


if __name__ == "__main__":
    main()
