"""The streams of a chaos run: of every kind, each again and again, compared with its first run.

Stream number n always asks the same, so its answer must always be the same. The kinds take turns:
greedy, seeded, penalised, constrained, ended by a stop token.
"""

import random
from dataclasses import dataclass, field

from core.completion import Completion
from core.errors import TwophaseError
from core.sampling import Constraint, ConstraintKind, Sampling
from twophase.client import AsyncClient

# Ids below are control tokens in the models that twophase knows.
FIRST_PLAIN_TOKEN_ID = 100
MIN_PROMPT_TOKENS, MORE_PROMPT_TOKENS = 40, 29
# Two tokens whose probabilities differ by less may change places when batches differ (float32).
NEAR_TIE = 1e-3
# Draws are between few tokens: between thousands of unlikely ones, many a draw is such a tie.
TOP_K = 5


@dataclass(slots=True)
class Stream:
    """One answer as its client got it: tokens, and how it ended."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    # By token, of greedy streams: how much likelier the first choice is than the second.
    margins: list[float] = field(default_factory=list)
    completion: Completion | None = None
    error: TwophaseError | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each attempt that a fault ended."""
        known = self.completion or (self.error and self.error.completion)
        return known.failures if known else ()

    def first_difference(self, expected: "Stream") -> int | None:
        """Where it leaves the answer of a run without faults; None if it is equal.

        A near tie of the expected answer is no difference, nor is what follows it.
        """
        for index, token_id in enumerate(expected.token_ids):
            if self.token_ids[index : index + 1] != [token_id]:
                is_tie = index < len(expected.margins) and expected.margins[index] < NEAR_TIE
                return None if is_tie else index
        longer = len(self.token_ids) > len(expected.token_ids)
        return len(expected.token_ids) if longer else None


KINDS = ("greedy", "seeded", "penalised", "constrained", "stop token")


def kind_of(number: int) -> str:
    """What kind of stream this is."""
    return KINDS[number % len(KINDS)]


def prompt_of(number: int, vocab_size: int) -> list[int]:
    """The prompt of a stream: plain tokens that no other stream begins with."""
    draw = random.Random(number)
    num_tokens = MIN_PROMPT_TOKENS + MORE_PROMPT_TOKENS * (number % 16)
    return [draw.randrange(FIRST_PLAIN_TOKEN_ID, vocab_size) for _ in range(num_tokens)]


def sampling_of(number: int, max_tokens: int, vocab_size: int) -> Sampling:
    """How a stream chooses its tokens."""
    match kind_of(number):
        case "seeded":
            return Sampling(max_tokens, temperature=0.9, top_k=TOP_K, seed=number, ignore_eos=True)
        case "penalised":
            return Sampling(
                max_tokens,
                temperature=0.7,
                top_k=TOP_K,
                seed=number,
                ignore_eos=True,
                repetition_penalty=1.2,
                frequency_penalty=0.3,
            )
        case "constrained":
            words = Constraint(ConstraintKind.REGEX, "([a-z]{3,6} ){8,12}[a-z]{3,6}")
            return Sampling(max_tokens, constraint=words)
        case "stop token":
            stops = tuple(range(number % 7 + FIRST_PLAIN_TOKEN_ID, vocab_size, vocab_size // 8))
            return Sampling(
                max_tokens, temperature=0.9, top_k=TOP_K, seed=number, stop_token_ids=stops
            )
    return Sampling(max_tokens, ignore_eos=True, num_logprobs=2)


async def run_stream(
    client: AsyncClient, number: int, *, max_tokens: int, vocab_size: int
) -> Stream:
    """Read one whole answer; an error is kept, not raised."""
    stream = Stream(number)
    prompt, sampling = prompt_of(number, vocab_size), sampling_of(number, max_tokens, vocab_size)
    try:
        async for chunk in client.generate(prompt, sampling):
            stream.token_ids += chunk.token_ids
            stream.margins += [one.top[0][1] - one.top[1][1] for one in chunk.logprobs]
            stream.completion = chunk.completion
    except TwophaseError as error:
        stream.error = error
    return stream
