"""The requests of a round: when each is due, its prompt, and how long its answer is to be.

A function of the plan, its seed and the round alone, so every way gets the same. A trace tells no
text: a prompt is made of random tokens, and prompts that share blocks in the trace begin alike
here. Rounds differ in the tokens, so that no round finds its prompts in a prefix cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from bench.compare.plan import WorkloadPlan
from bench.load import random_prompt
from bench.simulate.trace import MOONCAKE_BLOCK_TOKENS, Arrival, read_trace
from core.errors import ConfigError

DEFAULT_REQUESTS_PER_S = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; due_s counts from the begin of its round."""

    due_s: float
    prompt: tuple[int, ...]
    num_output_tokens: int


def read_prompts(plan: WorkloadPlan) -> list[str]:
    """The prompts of the plan's file; none without one.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    if plan.prompts is None:
        return []
    try:
        lines = plan.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(str(plan.prompts), f"cannot be read ({error})") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise ConfigError(str(plan.prompts), "holds no prompt")
    return found


@dataclass(frozen=True, slots=True)
class Workload:
    """A plan with what its files hold; prompts are tokenized already."""

    plan: WorkloadPlan
    arrivals: tuple[Arrival, ...]
    prompts: tuple[tuple[int, ...], ...]
    seed: int

    @classmethod
    def load(
        cls, plan: WorkloadPlan, prompts: Sequence[tuple[int, ...]], *, seed: int
    ) -> "Workload":
        """Read the trace, if there is one.

        Raises:
            ConfigError: it cannot be read.
        """
        arrivals = read_trace(plan.trace, block_size=MOONCAKE_BLOCK_TOKENS) if plan.trace else []
        return cls(plan, tuple(arrivals), tuple(prompts), seed)

    def asks(self, round_number: int, vocab_size: int, max_context_tokens: int) -> list[Ask]:
        """The requests of a round, in order of their time; each fits the model's context."""
        plan, found = self.plan, []
        tokens = _Tokens(f"{self.seed}/{plan.name}/{round_number}", vocab_size)
        for index, (due_s, arrival) in enumerate(self._scheduled()):
            num_output = max(arrival.num_output_tokens // (plan.divide_output or plan.divide), 1)
            num_output = min(num_output, plan.max_output_tokens, max_context_tokens // 2)
            num_prompt = max(arrival.num_prompt_tokens // plan.divide, 1)
            num_prompt = min(num_prompt, plan.max_input_tokens, max_context_tokens - num_output)
            if self.prompts:
                prompt = self.prompts[index % len(self.prompts)][:num_prompt]
            else:
                block_tokens = max(MOONCAKE_BLOCK_TOKENS // plan.divide, 1)
                prompt = tokens.prompt(index, num_prompt, arrival.block_ids, block_tokens)
            found.append(Ask(due_s, prompt, num_output))
        return found

    def _scheduled(self) -> list[tuple[float, Arrival]]:
        """Which requests are due when."""
        plan = self.plan
        if self.arrivals and plan.requests_per_s is None:
            whole = [(arrival.at_s / plan.rate, arrival) for arrival in self.arrivals]
            return list(takewhile(lambda one: one[0] <= plan.duration_s, whole))[
                : plan.max_requests
            ]
        draw = random.Random(f"{self.seed}/{plan.name}")
        rate = plan.requests_per_s or DEFAULT_REQUESTS_PER_S
        gaps_s = (draw.expovariate(rate) for _ in range(plan.max_requests))
        times_s = list(takewhile(lambda at_s: at_s <= plan.duration_s, accumulate(gaps_s)))
        # A round without any request would measure nothing.
        return [(at_s, self._drawn(draw)) for at_s in times_s or [0.0]]

    def _drawn(self, draw: random.Random) -> Arrival:
        plan = self.plan
        if self.arrivals:
            return draw.choice(self.arrivals)
        return Arrival(0.0, plan.input_tokens or plan.max_input_tokens, plan.output_tokens)


class _Tokens:
    """Deterministic prompts: the same block name gives the same tokens."""

    def __init__(self, salt: str, vocab_size: int) -> None:
        self._salt = salt
        self._vocab_size = vocab_size

    def prompt(
        self, index: int, num_tokens: int, block_ids: Sequence[int], block_tokens: int
    ) -> tuple[int, ...]:
        """As many tokens as asked: of the blocks first, then of the prompt's own."""
        whole = block_ids[: num_tokens // block_tokens]
        shared = [self._drawn(f"block {name}", block_tokens) for name in whole]
        rest = self._drawn(f"own {index}", num_tokens - block_tokens * len(whole))
        return tuple(token for part in (*shared, rest) for token in part)

    def _drawn(self, name: str, num_tokens: int) -> tuple[int, ...]:
        return random_prompt(random.Random(f"{self._salt}/{name}"), num_tokens, self._vocab_size)
