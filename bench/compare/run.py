"""Plays a plan: starts the cluster of each way, probes, and lets the ways take turns.

All clusters stay up from begin to end, so that each way is warm and none has the quieter hour;
while one plays, the others are idle. The order of the ways rotates from round to round.
"""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.compare.client import Answer, play
from bench.compare.crossover import Crossover
from bench.compare.metrics import Alone
from bench.compare.plan import ComparePlan
from bench.compare.probe import STREAM_PROMPT_TOKENS, Prober
from bench.compare.ways import config_of
from bench.compare.workload import Workload, read_prompts
from bench.machine import CpuMeter, CpuUse
from core.config import Mode
from core.events.step_log import StepRecord, read_step_logs
from core.request import WorkerName
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from deploy.own_client import wait_until_ready
from twophase.client import AsyncClient

READY_TIMEOUT_S = 120.0
WARM_UP_OUTPUT_TOKENS = 24
# What is measured alone besides the crossover's lengths; and in their place, without one.
SHORT_TOKENS = 16
ALONE_TOKENS = (128, 512, 1024, 2048)


class Progress(Protocol):
    """Who watches a run."""

    def stage(self, what: str, num_steps: int) -> None:
        """Something begins that has so many steps."""
        ...

    def step(self) -> None:
        """One of them is done."""
        ...


@dataclass(frozen=True, slots=True)
class Played:
    """One way's round of one workload; started_s is when time 0 of its schedule was."""

    workload: str
    way: Mode
    round_number: int
    answers: tuple[Answer, ...]
    cpu: CpuUse

    @property
    def started_s(self) -> float:
        """When time 0 of the schedule was, on the monotonic clock."""
        return self.answers[0].due_s - self.answers[0].ask.due_s


@dataclass(slots=True)
class Comparison:
    """All that was measured; steps of each worker of each way, by its name."""

    plan: ComparePlan
    max_context_tokens: int = 0
    alone: Alone | None = None
    alone_way: Mode = Mode.COLOCATED
    crossover: Crossover | None = None
    rounds: list[Played] = field(default_factory=list)
    steps: dict[Mode, dict[WorkerName, list[StepRecord]]] = field(default_factory=dict)

    def played(self, workload: str, way: Mode) -> list[Played]:
        """The rounds of one workload in one way, in order."""
        return [one for one in self.rounds if (one.workload, one.way) == (workload, way)]

    def rounds_of(self, workload: str) -> list[Played]:
        """The rounds of one workload in all ways."""
        return [one for one in self.rounds if one.workload == workload]


def compare(plan: ComparePlan, progress: Progress) -> Comparison:
    """Play it all; clusters are gone when it returns.

    Raises:
        ConfigError: the plan cannot be played.
        TwophaseError: a cluster does not start, or a probe failed.

    Contract: called in a thread that lives until it returns (see `local_cluster`).
    """
    for workload in plan.workloads:  # what is wrong with a file is said before anything starts
        read_prompts(workload)
        Workload.load(workload, (), seed=plan.seed)
    model = str(fetch_model(plan.model))
    comparison = Comparison(plan)
    with tempfile.TemporaryDirectory(prefix="twophase-compare-") as directory:
        logs = {way: Path(directory) / way for way in plan.ways}
        with ExitStack() as stack:
            progress.stage("starting clusters", len(plan.ways))
            addresses = {}
            for way, log in logs.items():
                config = config_of(plan, way, model=model, step_log=log)
                cluster = stack.enter_context(local_cluster(config, tell=lambda line: None))
                wait_until_ready(cluster.address, config.security, READY_TIMEOUT_S)
                addresses[way] = cluster.address
                progress.step()
            asyncio.run(_play(comparison, addresses, progress))
        comparison.steps = {way: read_step_logs(log) for way, log in logs.items()}
    return comparison


async def _play(comparison: Comparison, addresses: dict[Mode, str], progress: Progress) -> None:
    async with AsyncExitStack() as stack:
        clients = {
            way: await stack.enter_async_context(AsyncClient(address))
            for way, address in addresses.items()
        }
        await _Run(comparison, clients, progress).play()


class _Run:
    def __init__(
        self, comparison: Comparison, clients: dict[Mode, AsyncClient], progress: Progress
    ) -> None:
        self._comparison = comparison
        self._plan = comparison.plan
        self._clients = clients
        self._progress = progress
        self._vocab_size = 0

    async def play(self) -> None:
        """Warm up, probe, and play every workload."""
        first = next(iter(self._clients.values()))
        model = await first.model()
        self._vocab_size = model.vocab_size
        self._comparison.max_context_tokens = model.max_context_tokens
        workloads = [
            await self._loaded(first, number) for number in range(len(self._plan.workloads))
        ]
        await self._warm_up()
        await self._probe()
        for workload in workloads:
            await self._play_workload(workload)

    async def _loaded(self, client: AsyncClient, number: int) -> Workload:
        plan = self._plan.workloads[number]
        prompts = [await client.tokenize(prompt) for prompt in read_prompts(plan)]
        return Workload.load(plan, prompts, seed=self._plan.seed)

    def _prober(self, way: Mode) -> Prober:
        draw = random.Random(f"{self._plan.seed}/{way}")
        return Prober(self._clients[way], draw, self._vocab_size, self._plan.timeout_s)

    def _lengths(self) -> tuple[int, ...]:
        """Of the probes; a model of a short context has fewer."""
        crossover = self._plan.crossover
        lengths = crossover.input_tokens if crossover is not None else ALONE_TOKENS
        most = self._comparison.max_context_tokens - STREAM_PROMPT_TOKENS
        return tuple(length for length in lengths if length <= most) or (max(most // 2, 1),)

    async def _warm_up(self) -> None:
        """Let every worker see prompts of all lengths and a batch of streams."""
        self._progress.stage("warming up", len(self._clients))
        for way in self._clients:
            prober = self._prober(way)
            lengths = [self._lengths()[-1], *[STREAM_PROMPT_TOKENS] * 3] * self._plan.workers
            asks = [prober.new_answer(length, WARM_UP_OUTPUT_TOKENS).ask for length in lengths]
            await play(self._clients[way], asks, timeout_s=self._plan.timeout_s)
            self._progress.step()

    async def _probe(self) -> None:
        crossover, ways = self._plan.crossover, self._plan.ways
        self._progress.stage("one request alone", 1)
        way = Mode.COLOCATED if Mode.COLOCATED in ways else ways[0]
        self._comparison.alone_way = way
        self._comparison.alone = await self._prober(way).alone(
            sorted({SHORT_TOKENS, *self._lengths()})
        )
        self._progress.step()
        if crossover is None:
            return
        self._progress.stage("prompts of growing length beside streams", len(ways))
        points = {}
        for way in ways:
            beside = await self._prober(way).beside_streams(
                self._lengths(), crossover.streams, crossover.quiet_s
            )
            points[way] = tuple(beside)
            self._progress.step()
        self._comparison.crossover = Crossover(points)

    async def _play_workload(self, workload: Workload) -> None:
        plan = self._plan
        name = workload.plan.name
        for number in range(plan.rounds):
            asks = workload.asks(number, self._vocab_size, self._comparison.max_context_tokens)
            for way in _rotated(plan.ways, number):
                what = f"{name}, round {number + 1} of {plan.rounds}, {way}"
                self._progress.stage(what, len(asks))
                meter = CpuMeter()
                answers = await play(
                    self._clients[way],
                    asks,
                    timeout_s=plan.timeout_s,
                    on_end=self._progress.step,
                )
                played = Played(name, way, number, tuple(answers), meter.read())
                self._comparison.rounds.append(played)


def _rotated(ways: Sequence[Mode], number: int) -> list[Mode]:
    turn = number % len(ways)
    return [*ways[turn:], *ways[:turn]]
