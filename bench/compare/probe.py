"""What a request takes alone, and what prompts of growing length do to running streams.

Both are measured before the workloads, on the same clusters: the first is what slowdowns are
multiples of, the second is what the crossover is read from (`crossover`).
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.client import Answer, ask_one
from bench.compare.crossover import Beside
from bench.compare.metrics import Alone, percentile
from bench.compare.workload import Ask
from bench.load import Gap, random_prompt
from core.errors import TwophaseError
from twophase.client import AsyncClient

STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 64, 512
# Streams that have this many tokens no longer feel the prefill of their neighbours.
SETTLED_TOKENS = 8
RETRY_S = 1.0
PROBE_OUTPUT_TOKENS, ALONE_OUTPUT_TOKENS = 2, 12
SETTLE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Prober:
    """One way's cluster, and where its prompts come from."""

    client: AsyncClient
    draw: random.Random
    vocab_size: int
    timeout_s: float

    async def alone(self, lengths: Sequence[int]) -> Alone:
        """One request after another, each alone.

        Raises:
            TwophaseError: one of them failed.
        """
        ttfts_s, tpots_s = [], []
        for length in lengths:
            timing = (await self._one(length, ALONE_OUTPUT_TOKENS)).timing()
            assert timing is not None and timing.tpot_s is not None
            ttfts_s.append((length, timing.ttft_s))
            tpots_s.append(timing.tpot_s)
        return Alone(tuple(ttfts_s), statistics.median(tpots_s))

    async def beside_streams(
        self, lengths: Sequence[int], num_streams: int, quiet_s: float
    ) -> list[Beside]:
        """A prompt of each length in turn, while streams run.

        Raises:
            TwophaseError: a prompt failed, or the streams did not start in time.
        """
        streams = _Streams(self, num_streams)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(streams.run(number)) for number in range(num_streams)]
            try:
                await streams.settled()
                return [await self._beside(streams, length, quiet_s) for length in lengths]
            finally:
                for task in running:
                    task.cancel()

    async def _beside(self, streams: "_Streams", length: int, quiet_s: float) -> Beside:
        quiet_from_s = time.monotonic()
        await asyncio.sleep(quiet_s)
        sent_s = time.monotonic()
        answer = await self._one(length, PROBE_OUTPUT_TOKENS)
        # Gaps that are open now end a step later.
        await asyncio.sleep(quiet_s)
        ended_s = answer.log.arrival_of(PROBE_OUTPUT_TOKENS - 1)
        gaps = streams.gaps()
        quiet = [g.seconds for g in gaps if g.started_s >= quiet_from_s and g.ended_s <= sent_s]
        during = [gap.seconds for gap in gaps if gap.overlaps(sent_s, ended_s)]
        return Beside(
            num_prompt_tokens=length,
            ttft_s=answer.log.ttft_s,
            quiet_itl_s=percentile(quiet or during, 50),
            itl_p99_s=percentile(during, 99),
            itl_max_s=max(during),
        )

    async def _one(self, length: int, num_output_tokens: int) -> Answer:
        answer = self.new_answer(length, num_output_tokens)
        await ask_one(self.client, answer, timeout_s=self.timeout_s)
        if answer.error is not None:
            raise answer.error
        return answer

    def new_answer(self, length: int, num_output_tokens: int) -> Answer:
        """A request with a prompt that nobody has seen, due now."""
        prompt = random_prompt(self.draw, length, self.vocab_size)
        return Answer(Ask(0.0, prompt, num_output_tokens), time.monotonic())


class _Streams:
    """Answers that follow each other without a pause, `num_streams` at a time."""

    def __init__(self, prober: Prober, num_streams: int) -> None:
        self._prober = prober
        self._answers: list[list[Answer]] = [[] for _ in range(num_streams)]
        self._is_settled = asyncio.Event()

    async def run(self, number: int) -> None:
        """Ask again and again; never returns."""
        while True:
            answer = self._prober.new_answer(STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS)
            self._answers[number].append(answer)
            await ask_one(
                self._prober.client,
                answer,
                timeout_s=self._prober.timeout_s,
                on_tokens=self._look,
            )
            if answer.error is not None:
                await asyncio.sleep(RETRY_S)

    async def settled(self) -> None:
        """Return once every stream has SETTLED_TOKENS."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._is_settled.wait()
        except TimeoutError as error:
            raise TwophaseError(f"streams did not start within {SETTLE_TIMEOUT_S:g} s") from error

    def gaps(self) -> list[Gap]:
        """All gaps of all answers so far."""
        return [gap for own in self._answers for answer in own for gap in answer.log.gaps()]

    def _look(self) -> None:
        if all(own and own[-1].log.num_tokens >= SETTLED_TOKENS for own in self._answers):
            self._is_settled.set()
