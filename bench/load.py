"""Requests sent to a cluster, and when each token came back: the client's side of every bench.

Times are this process's monotonic clock, read when the message arrives; nothing is taken from the
server's own reports. One message may carry several tokens: they arrived together, so the first of
them has the whole gap since the message before and each other one has a gap of 0.

Runs in one event loop, in another process than the cluster's servers.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.completion import Completion
from twophase.client import AsyncClient, Sampling

# Ids below are control tokens in the models that twophase knows.
FIRST_PLAIN_TOKEN_ID = 100


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message with `num_tokens` new tokens."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between one token and the next of one stream: an inter-token latency."""

    started_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """How long nothing came."""
        return self.ended_s - self.started_s

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Whether a part of it lies in (start_s, end_s)."""
        return self.started_s < end_s and self.ended_s > start_s


@dataclass(slots=True)
class StreamLog:
    """One request as the client saw it; `arrivals` grows while it runs."""

    sent_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Request sent to first token here; needs an arrival."""
        return self.arrivals[0].at_s - self.sent_s

    def arrival_of(self, index: int) -> float:
        """When the token with this index (from 0) came.

        Raises:
            IndexError: there is no such token.
        """
        num_before = 0
        for arrival in self.arrivals:
            num_before += arrival.num_tokens
            if index < num_before:
                return arrival.at_s
        raise IndexError(f"token {index} of a stream of {num_before}")

    def gaps(self) -> list[Gap]:
        """One gap for each token after the first."""
        gaps: list[Gap] = []
        for before, arrival in zip([None, *self.arrivals], self.arrivals, strict=False):
            num_together = arrival.num_tokens - 1
            if before is not None:
                gaps.append(Gap(before.at_s, arrival.at_s))
            gaps += [Gap(arrival.at_s, arrival.at_s)] * num_together
        return gaps

    def num_tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens that came in (start_s, end_s]."""
        return sum(a.num_tokens for a in self.arrivals if start_s < a.at_s <= end_s)


async def stream(
    client: AsyncClient,
    prompt: Sequence[int],
    log: StreamLog,
    *,
    max_tokens: int,
    timeout_s: float,
    on_arrival: Callable[[], None] = lambda: None,
) -> None:
    """Send one greedy request of exactly `max_tokens` output tokens and write what comes to `log`.

    on_arrival is called after each message with tokens. Raises what the client raises.
    """
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    log.sent_s = time.monotonic()
    async for chunk in client.generate(prompt, sampling, timeout_s=timeout_s):
        if chunk.token_ids:
            log.arrivals.append(Arrival(time.monotonic(), len(chunk.token_ids)))
            on_arrival()
        log.completion = chunk.completion


def random_prompt(generator: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Plain token ids, each drawn alone: two prompts share no block but by a rare accident."""
    return tuple(generator.randrange(FIRST_PLAIN_TOKEN_ID, vocab_size) for _ in range(num_tokens))
