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
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from bench.interference_result import MEASURES, Observation, Peer, Result, median_of, numbers_of
from bench.load import StreamLog, random_prompt, stream
from bench.machine import CpuMeter, read_gb_per_s, spin
from bench.report import print_report
from core.config import ClusterConfig, DecodeConfig, EngineConfig, Mode, PrefillConfig
from core.errors import PeerLost, TwophaseError
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.settings.router import RouterConfig
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
REQUEST_TIMEOUT_S = 60.0
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
        is_chunked = self.mode is Mode.CHUNKED
        budget = chunk_tokens if is_chunked else DecodeConfig().max_batch_tokens
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
                max_batch_tokens=budget,
            ),
            router=RouterConfig(port=0, http_port=None),
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


@dataclass(frozen=True, slots=True)
class Seen:
    """All rounds of one setup, and what became of those that failed."""

    setup: Setup
    rounds: list[Observation] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def result(self) -> Result:
        """The numbers; needs a round."""
        return Result(
            self.setup.name,
            tuple(numbers_of(observation) for observation in self.rounds),
            self.setup.peer,
            has_limits=self.setup.mode is Mode.DISAGGREGATED,
        )


async def measure(
    clusters: Sequence[tuple[Setup, str]], *, num_rounds: int, seed: int
) -> list[Seen]:
    """Warm all clusters up, then let them take turns; clusters are setups with their addresses."""
    generator = random.Random(seed)
    seen = [Seen(setup) for setup, _ in clusters]
    for setup, address in clusters:
        async with AsyncClient(address) as client:
            await warm_up(client, generator, setup.replicas)
    for number in range(1, num_rounds + 1):
        for of_setup, (_, address) in zip(seen, clusters, strict=True):
            async with AsyncClient(address) as client:
                vocab_size = (await client.model()).vocab_size
                try:
                    of_setup.rounds.append(await observe(client, generator, vocab_size))
                except* TwophaseError as group:
                    of_setup.failures.append(f"round {number}: {group.exceptions[0]}")
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


def remarks(seen: Sequence[Seen]) -> list[str]:
    """What a reader must know before believing the numbers."""
    return [remark for of_setup in seen for remark in _remarks_on(of_setup)]


def _remarks_on(seen: Seen) -> Iterator[str]:
    name = seen.setup.name
    for failure in seen.failures:
        yield f"failed: {name}: {failure}"
    others = [r.cpu.other_cores + r.cpu.stolen_cores for r in seen.rounds]
    if max(others, default=0.0) > NOISY_CORES:
        shown = ", ".join(f"{cores:.2f}" for cores in others)
        yield f"noisy: {name}: other work took {shown} cores of {len(CORES)} by round"
    if not all(r.is_covered for r in seen.rounds):
        yield f"short: {name}: streams ended before the long prompt was running"
    messages = [a for r in seen.rounds for log in r.streams for a in log.arrivals]
    num_joined = sum(message.num_tokens > 1 for message in messages)
    if num_joined:
        yield (
            f"joined: {name}: {num_joined} of {len(messages)} messages carried more than one "
            "token; the later ones count as gaps of 0"
        )


def run(
    setups: Sequence[Setup], *, num_rounds: int, seed: int, chunk_tokens: int, console: Console
) -> list[Seen]:
    """Start all clusters, measure, stop them."""
    model = str(fetch_model(DEFAULT_MODEL))
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting clusters"))
        clusters = []
        for setup in setups:
            config = setup.config(model=model, chunk_tokens=chunk_tokens)
            cluster = stack.enter_context(local_cluster(config, tell=status.update))
            clusters.append((setup, cluster.address))
        status.update("measuring")
        return asyncio.run(measure(clusters, num_rounds=num_rounds, seed=seed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the report; returns the exit code, 1 if a setup has no round."""
    options = _parse(arguments)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    for core in CORES:
        console.print(core_line(core))
    seen = run(
        [setup for setup in SETUPS if options.only in setup.name],
        num_rounds=options.rounds,
        seed=options.seed,
        chunk_tokens=options.chunk_tokens,
        console=console,
    )
    measured = [of_setup for of_setup in seen if of_setup.rounds]
    results = [of_setup.result() for of_setup in measured]
    if options.figure is not None:
        from bench.interference_figure import draw

        draw({one.setup.name: one.rounds[0] for one in measured}, options.figure)
    console.print(overview(results))
    for line in remarks(seen):
        console.print(line)
    print_report("Interference", [row for result in results for row in result.rows()])
    return 0 if len(measured) == len(seen) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.interference", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per setup (median)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="step budget, mode chunked")
    parser.add_argument("--only", default="", help="setups whose name holds this")
    parser.add_argument("--figure", type=Path, help="write gaps over time to this .png")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
