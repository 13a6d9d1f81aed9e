"""The load client: sends each request when it is due, whatever became of those before.

It never waits for an answer before it sends the next request (open loop), and times count from
when a request was due, not from when it was sent: a server that falls behind cannot slow the
questions down and look fast. How late the client itself was is kept beside each answer.

Bounded: as many requests as the workload has, each at most `timeout_s` long.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.compare.metrics import Timing
from bench.compare.workload import Ask
from bench.load import Arrival, StreamLog
from core.completion import Completion
from core.errors import TwophaseError
from twophase.client import AsyncClient, Sampling

# Time for the tasks of the first requests to be made.
LEAD_S = 0.1


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; times are of this process's monotonic clock.

    margins: by token, how much likelier the chosen one was than the next.
    """

    ask: Ask
    due_s: float
    log: StreamLog = field(default_factory=StreamLog)
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    error: TwophaseError | None = None

    @property
    def lateness_s(self) -> float:
        """How long after its time the client sent it."""
        return self.log.sent_s - self.due_s

    @property
    def completion(self) -> Completion | None:
        """How it ended; None for one that failed."""
        return self.log.completion

    def timing(self) -> Timing | None:
        """Its times; None if it failed or brought no token."""
        if self.error is not None or not self.log.arrivals:
            return None
        return Timing(
            due_s=self.due_s,
            first_token_s=self.log.arrivals[0].at_s,
            last_token_s=self.log.arrivals[-1].at_s,
            num_prompt_tokens=len(self.ask.prompt),
            num_output_tokens=self.log.num_tokens,
            gaps_s=tuple(gap.seconds for gap in self.log.gaps()),
        )


async def play(
    client: AsyncClient,
    asks: Sequence[Ask],
    *,
    timeout_s: float,
    on_end: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Play a round; returns when every request has ended, in the order of `asks`.

    on_end is called after each. An error of a request is kept in its answer, not raised.
    """
    started_s = time.monotonic() + LEAD_S
    answers = [Answer(ask, started_s + ask.due_s) for ask in asks]
    async with asyncio.TaskGroup() as tasks:
        for answer in answers:
            await asyncio.sleep(max(answer.due_s - time.monotonic(), 0.0))
            tasks.create_task(ask_one(client, answer, timeout_s=timeout_s, on_end=on_end))
    return answers


async def ask_one(
    client: AsyncClient,
    answer: Answer,
    *,
    timeout_s: float,
    on_end: Callable[[], None] = lambda: None,
    on_tokens: Callable[[], None] = lambda: None,
) -> None:
    """Send one greedy request now and write what comes into `answer`."""
    sampling = Sampling(
        answer.ask.num_output_tokens, temperature=0.0, ignore_eos=True, num_logprobs=2
    )
    log = answer.log
    log.sent_s = time.monotonic()
    try:
        async for chunk in client.generate(answer.ask.prompt, sampling, timeout_s=timeout_s):
            if chunk.token_ids:
                log.arrivals.append(Arrival(time.monotonic(), len(chunk.token_ids)))
                answer.token_ids += chunk.token_ids
                answer.margins += [one.top[0][1] - one.top[1][1] for one in chunk.logprobs]
                on_tokens()
            log.completion = chunk.completion
    except TwophaseError as error:
        answer.error = error
    on_end()
