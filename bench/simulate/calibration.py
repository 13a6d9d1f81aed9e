"""A machine's coefficients, measured through a cluster of one prefill and one decode worker.

    alone    prompts of several lengths, one after the other; batches of several sizes that decode
    crowded  the same prompts while a batch decodes, and a batch while prompts are read

The client's clock measures all but the last piece of a handoff, whose delay the prefill worker
reports. Prompts are random tokens, so no cache has them. Before each the worker has idled for a
while, as it does between those of a load: a first step after that is slower. What is fitted are
means, since waits are made of all steps, slow ones, too.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load import StreamLog, random_prompt, stream
from bench.simulate.machine import LINK_BYTES_PER_S, Machine, not_negative
from twophase.client import AsyncClient

PROMPT_TOKENS = (16, 64, 192, 448, 896, 1280)
REPEATS = 3
IDLE_S = 0.4
# Batch size and prompt tokens of each sequence; one size with two histories tells what those cost.
BATCHES = ((1, 32), (2, 32), (4, 32), (4, 640), (8, 32))
BATCH_OUTPUT_TOKENS = 40
CROWD = (2, 32)
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Measured:
    """What was seen.

    prompts: tokens, and seconds to the first token; steps: batch size, tokens of history in all,
    and mean seconds, which crowded_step_s are of a batch of CROWD; handoffs of prompts of one step:
    bytes, and seconds after their prompt was read.
    """

    prompts: list[tuple[int, float]] = field(default_factory=list)
    crowded_prompts: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    crowded_step_s: float = 0.0
    handoffs: list[tuple[int, float]] = field(default_factory=list)

    def machine(self) -> Machine:
        """The machine that comes closest to all figures, in least squares of relative errors."""
        request_s, token_s, pair_s = _fit([((1.0, n, n * n / 2), s) for n, s in self.prompts])
        base_s, sequence_s, kv_s = _fit([((1.0, n, h), s) for n, h, s in self.steps])
        latency_s, byte_s = _fit([((1.0, size), s) for size, s in self.handoffs])
        alone_s = sum(seconds for _, seconds in self.prompts)
        crowded_s = sum(seconds for _, seconds in self.crowded_prompts)
        batch_s = statistics.mean(s for n, _, s in self.steps if n == CROWD[0])
        slowest = LINK_BYTES_PER_S["shm"]
        return Machine(
            prefill_token_s=token_s,
            prefill_pair_s=pair_s,
            decode_steps_s=((1, base_s + sequence_s), (2, base_s + 2 * sequence_s)),
            decode_kv_s=kv_s,
            link_bytes_per_s=min(1 / byte_s, slowest) if byte_s else slowest,
            link_latency_s=latency_s,
            request_s=request_s,
            prefill_crowding=max(crowded_s / alone_s, 1.0),
            decode_crowding=max(self.crowded_step_s / batch_s, 1.0),
        )


def _fit(figures: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Coefficients of what was measured so, of which equal figures count as their mean."""
    found: dict[tuple[float, ...], list[float]] = {}
    for row, seconds in figures:
        found.setdefault(row, []).append(seconds)
    means = {row: statistics.mean(seconds) for row, seconds in found.items()}
    rows = [tuple(value / mean_s for value in row) for row, mean_s in means.items()]
    return not_negative(rows, [1.0] * len(rows))


class Calibration:
    """Measures one cluster, as often as `run` is called."""

    def __init__(self, client: AsyncClient, vocab_size: int, *, seed: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)

    async def run(self) -> Measured:
        """All figures."""
        measured = Measured()
        await self._batch(*CROWD)  # first steps and the first handoff are slower than all others
        await self._one(PROMPT_TOKENS[-1], 2)
        measured.prompts, measured.handoffs = await self._prompts()
        for size, num_prompt_tokens in BATCHES:
            history, step_s = await self._batch(size, num_prompt_tokens)
            measured.steps.append((size, history, step_s))
        async with asyncio.TaskGroup() as tasks:
            crowd = [
                tasks.create_task(self._one(CROWD[1], 4096 // CROWD[0])) for _ in range(CROWD[0])
            ]
            measured.crowded_prompts, _ = await self._prompts()
            for task in crowd:
                task.cancel()
        measured.crowded_step_s = await self._crowded_step_s()
        return measured

    async def _one(self, num_prompt_tokens: int, max_tokens: int) -> StreamLog:
        log = StreamLog()
        prompt = random_prompt(self._draw, num_prompt_tokens, self._vocab_size)
        await stream(self._client, prompt, log, max_tokens=max_tokens, timeout_s=TIMEOUT_S)
        return log

    async def _prompts(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        found, handoffs = [], []
        for num_tokens in PROMPT_TOKENS:
            logs = []
            for _ in range(REPEATS):
                await asyncio.sleep(IDLE_S)
                logs.append(await self._one(num_tokens, 2))
            found += [(num_tokens, log.ttft_s) for log in logs]
            for log in logs:
                if num_tokens <= 512 and log.completion is not None and log.completion.transfer:
                    transfer = log.completion.transfer
                    handoffs.append((transfer.num_bytes, transfer.exposed_s))
        return found, handoffs

    async def _batch(self, size: int, num_prompt_tokens: int) -> tuple[float, float]:
        """Tokens of history of all, on average, and the mean step while all of them decode."""
        one = [self._one(num_prompt_tokens, BATCH_OUTPUT_TOKENS + 4 * size) for _ in range(size)]
        logs = await asyncio.gather(*one)
        return size * (num_prompt_tokens + BATCH_OUTPUT_TOKENS / 2), _step_s(logs)

    async def _crowded_step_s(self) -> float:
        """The step of CROWD while prompts are read without a pause."""
        size, num_prompt_tokens = CROWD
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(self._read_on()) for _ in range(2)]
            await asyncio.sleep(1.0)  # a prompt is being read from now on
            one = [self._one(num_prompt_tokens, BATCH_OUTPUT_TOKENS) for _ in range(size)]
            logs = await asyncio.gather(*one)
            for reader in readers:
                reader.cancel()
        return _step_s(logs)

    async def _read_on(self) -> None:
        while True:
            await self._one(PROMPT_TOKENS[-1], 1)


def _step_s(logs: Sequence[StreamLog]) -> float:
    """The mean gap while all of these streams are under way."""
    start_s = max(log.arrivals[0].at_s for log in logs)
    end_s = min(log.arrivals[-1].at_s for log in logs)
    gaps = [gap for log in logs for gap in log.gaps()]
    return statistics.mean(g.seconds for g in gaps if start_s < g.started_s < end_s)
