"""What arrives when: recorded traces, and synthetic ones.

Formats are told by a file's columns: Azure's LLM inference traces (TIMESTAMP, ContextTokens,
GeneratedTokens; Patel et al., ISCA'24), Mooncake's (JSON lines with hash_ids of 512-token blocks;
FAST'25), and what a router with `router.record` has written. Mooncake's times are rounded to 3 s:
each tick's requests are spread over the next 3 s.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from core.errors import ConfigError
from router.placing.prefix_index import PromptBlocks

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_S = 3.0
# Blocks of a trace's copies and repetitions have other names: no trace has so many blocks.
COPY_BITS, TURN_BITS = 40, 52


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; block_ids name its full prompt blocks, where the trace tells them."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


class TraceBlocks(PromptBlocks):
    """A prompt of which only the names of its blocks are known."""

    def __init__(self, arrival: Arrival) -> None:
        self.num_tokens = arrival.num_prompt_tokens
        self._block_ids = arrival.block_ids

    def hashes(self, block_size: int) -> tuple[int, ...]:
        """The names; the trace was scaled so that its blocks are the cluster's."""
        return self._block_ids


def read_trace(path: Path, *, block_size: int, seed: int = 0) -> list[Arrival]:
    """The requests of a file, in order, from time 0.

    Mooncake's lengths are divided so that its blocks become `block_size` tokens.

    Raises:
        ConfigError: it cannot be read, or has another format.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            first = lines.readline()
            lines.seek(0)
            if "num_prompt_tokens" in first:
                found = list(_recorded(lines, block_size))
            elif first.startswith("{"):
                found = list(_mooncake(lines, block_size, random.Random(seed)))
            elif {"TIMESTAMP", "ContextTokens"} <= set(first.strip().split(",")):
                found = list(_azure(lines))
            else:
                raise ConfigError(str(path), f"is no known trace: it begins with {first[:60]!r}")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(str(path), f"is not a whole trace: {error!r}") from error
    if not found:
        raise ConfigError(str(path), "holds no request")
    found.sort(key=lambda arrival: arrival.at_s)
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def poisson(
    requests_per_s: float, seconds: float, prompt: int, output: int, *, seed: int = 0
) -> list[Arrival]:
    """Random arrivals of requests with exponentially spread lengths, cut at four times the mean."""
    draw, found, now_s = random.Random(seed), [], 0.0
    while (now_s := now_s + draw.expovariate(requests_per_s)) < seconds:
        num_prompt, num_output = (
            min(max(1, round(draw.expovariate(1 / mean))), 4 * mean) for mean in (prompt, output)
        )
        found.append(Arrival(now_s, num_prompt, num_output))
    return found


def turning(seconds: float, *, seed: int = 0) -> list[Arrival]:
    """Long prompts with short answers for half of the time, then the other way round."""
    half_s = seconds / 2
    first = poisson(2.2, half_s, 2000, 24, seed=seed)
    second = poisson(2.2, half_s, 200, 200, seed=seed + 1)
    return [*first, *(replace(arrival, at_s=arrival.at_s + half_s) for arrival in second)]


def scaled(
    arrivals: Sequence[Arrival], *, rate: float = 1.0, num_requests: int | None = None
) -> list[Arrival]:
    """`rate` times as many requests a second; the trace is repeated, or cut, to `num_requests`.

    A repetition is another hour: it shares no blocks with the first.
    """
    wanted = len(arrivals) if num_requests is None else num_requests
    span_s = arrivals[-1].at_s + arrivals[-1].at_s / max(len(arrivals) - 1, 1)
    found = []
    for number in range(wanted):
        turn, index = divmod(number, len(arrivals))
        arrival = arrivals[index]
        blocks = tuple((turn << TURN_BITS) + block for block in arrival.block_ids)
        at_s = (arrival.at_s + turn * span_s) / rate
        found.append(replace(arrival, at_s=at_s, block_ids=blocks))
    return found


def overlaid(arrivals: Sequence[Arrival], copies: int, *, seed: int = 0) -> list[Arrival]:
    """`copies` times as many requests in the same time: the first copy is the trace itself.

    Each other one begins at another moment of it, drawn at random, and goes on with its start after
    its end: other users of the same kind. Copies share no blocks.
    """
    draw = random.Random(seed)
    span_s = arrivals[-1].at_s + arrivals[-1].at_s / max(len(arrivals) - 1, 1)
    found = list(arrivals)
    for copy in range(1, copies):
        shift_s = draw.uniform(0, span_s)
        for arrival in arrivals:
            blocks = tuple((copy << COPY_BITS) + block for block in arrival.block_ids)
            at_s = (arrival.at_s + shift_s) % span_s
            found.append(replace(arrival, at_s=at_s, block_ids=blocks))
    return sorted(found, key=lambda arrival: arrival.at_s)


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        # Seven digits of a second: one more than Python reads.
        when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        lengths = (int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1))
        yield Arrival(when.timestamp(), *lengths)


def _mooncake(lines: Iterator[str], block_size: int, draw: random.Random) -> Iterator[Arrival]:
    shrink = MOONCAKE_BLOCK_TOKENS // block_size
    for line in lines:
        row = json.loads(line)
        num_tokens = max(row["input_length"] // shrink, 1)
        yield Arrival(
            row["timestamp"] / 1000 + draw.uniform(0, MOONCAKE_TICK_S),
            num_tokens,
            max(row["output_length"] // shrink, 1),
            tuple(row["hash_ids"][: num_tokens // block_size]),
        )


def _recorded(lines: Iterator[str], block_size: int) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        if row["block_size"] != block_size:
            raise ValueError(f"blocks of {row['block_size']} tokens, not {block_size}")
        lengths = (row["num_prompt_tokens"], max(row["num_output_tokens"], 1))
        yield Arrival(row["at_s"], *lengths, tuple(row["blocks"]))
