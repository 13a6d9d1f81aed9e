"""The engine on one core, beside transformers on the same weights and the machine's own limit.

    python -m bench.engine [MODEL] [--turns N] [--dtypes float32 bfloat16] [--core C]

Prefill of one prompt, and decode steps of 1, 8 and 16 sequences that each have 512 tokens of
history. The two engines take turns in one run, each turn is a few repeats, and the median of all
is reported, so that a busy neighbour hits both. The limit of a case is what the core could do if
it did nothing else than the products at its measured matrix rate, or than reading every weight
once (and the KV history) at its measured read speed, whichever takes longer.
"""

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol  # transformers' models have no types

import torch

from bench.report import Row, print_report
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.request import SamplingParams
from deploy.model_store import fetch_model
from engine.batch import SequenceStep
from engine.kv_cache import TORCH_DTYPES
from engine.model_config import ModelConfig, load_model_config
from engine.runner import Runner

BLOCK_SIZE = 16
HISTORY_TOKENS = 512
PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8, 16)
DECODE_STEPS = 8
MAX_TOKENS = HISTORY_TOKENS + 2 * DECODE_STEPS
READ_BYTES = 512 << 20
MATRIX_SIZE = 2048
LIMIT_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Prefill of `size` tokens, or decode of `size` sequences with HISTORY_TOKENS each."""

    phase: str
    size: int

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.phase} {self.size}" if self.phase == "prefill" else f"decode b{self.size}"


CASES = (
    *(Case("prefill", size) for size in PREFILL_TOKENS),
    *(Case("decode", size) for size in DECODE_BATCHES),
)


class Contender(Protocol):
    """An engine that can be timed."""

    def seconds(self, case: Case) -> list[float]:
        """Seconds of one prefill, or of each of DECODE_STEPS decode steps."""
        ...


class TwophaseContender:
    """This engine, through the call that workers use."""

    def __init__(self, directory: Path, dtype: Dtype) -> None:
        config = load_model_config(directory)
        num_tokens = max(max(PREFILL_TOKENS), max(DECODE_BATCHES) * (MAX_TOKENS + BLOCK_SIZE))
        token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim
        self._runner = Runner(
            directory,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            kv_cache_bytes=(num_tokens + BLOCK_SIZE) * token_bytes * dtype.itemsize,
            num_threads=1,
        )
        self._runner.warm_up()
        self._runner.cache.kv_L2NSKD.normal_()

    def seconds(self, case: Case) -> list[float]:
        """See `Contender`."""
        if case.phase == "prefill":
            blocks = range(-(-case.size // BLOCK_SIZE))
            step = SequenceStep(_prompt(case.size), 0, blocks, SamplingParams())
            return [_timed(lambda: self._runner.step([step]))]
        width = -(-MAX_TOKENS // BLOCK_SIZE)
        tables = [range(b * width, (b + 1) * width) for b in range(case.size)]
        starts = range(HISTORY_TOKENS, HISTORY_TOKENS + DECODE_STEPS)
        return [_timed(partial(self._decode, start, tables)) for start in starts]

    def _decode(self, start: int, tables: Sequence[range]) -> None:
        self._runner.step([SequenceStep([start], start, t, SamplingParams()) for t in tables])


class TransformersContender:
    """Hugging Face transformers with its default attention; greedy by argmax, nothing else."""

    def __init__(self, directory: Path, dtype: Dtype) -> None:
        from transformers import AutoModelForCausalLM

        logging.getLogger("transformers").setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)  # names that change within version 5
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=TORCH_DTYPES[dtype]
        )

    def seconds(self, case: Case) -> list[float]:
        """See `Contender`."""
        with torch.inference_mode():
            if case.phase == "prefill":
                prompt = torch.tensor([_prompt(case.size)])
                return [_timed(lambda: self._forward(prompt, None))]
            cache = self._forward(torch.tensor([_prompt(HISTORY_TOKENS)]), None)
            cache.batch_repeat_interleave(case.size)
            tokens = torch.full((case.size, 1), 7)
            return [_timed(lambda: self._forward(tokens, cache)) for _ in range(DECODE_STEPS)]

    def _forward(self, tokens: torch.Tensor, cache: Any) -> Any:
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(dim=-1).tolist()
        return output.past_key_values


@dataclass(frozen=True, slots=True)
class MachineLimit:
    """What one core can do: bytes read and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, dtype: Dtype) -> "MachineLimit":
        """The best of a few repeats: a limit is what was seen to be possible."""
        memory = torch.ones(READ_BYTES // 4)
        matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=TORCH_DTYPES[dtype])
        return cls(
            READ_BYTES / _fastest(memory.sum),
            2 * MATRIX_SIZE**3 / _fastest(lambda: matrix @ matrix),
        )

    def tokens_per_s(self, case: Case, config: ModelConfig, itemsize: int) -> float:
        """The limit of a case, by the slower of reading and multiplying."""
        width, size = config.hidden_size, config.head_dim
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * size * width
        layers = config.num_layers * (attention + 3 * width * config.intermediate_size)
        head = config.vocab_size * width
        num_bytes = (layers + head) * itemsize
        pairs = case.size * case.size / 2  # query and key positions that meet
        flops = 2.0 * (case.size * layers + head)
        if case.phase == "decode":
            pairs = case.size * HISTORY_TOKENS
            num_bytes += int(pairs * config.num_layers * 2 * config.num_kv_heads * size * itemsize)
            flops = 2.0 * case.size * (layers + head)
        flops += 4 * pairs * config.num_layers * config.num_heads * size
        return case.size / max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def _prompt(num_tokens: int) -> list[int]:
    return [(i * 7919) % 4096 + 3 for i in range(num_tokens)]


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _fastest(call: Callable[[], object]) -> float:
    return min(_timed(call) for _ in range(LIMIT_REPEATS))


def _median_rates(case: Case, contenders: Sequence[Contender], turns: int) -> Iterator[float]:
    """Tokens per second of each contender; the first turn warms up and is not counted."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(turns + 1):
        for taken, contender in zip(seconds, contenders, strict=True):
            repeats = contender.seconds(case)
            taken += repeats if turn else []
    return (case.size / statistics.median(taken) for taken in seconds)


def _rows(directory: Path, dtype: Dtype, turns: int) -> Iterator[Row]:
    config = load_model_config(directory)
    limit = MachineLimit.measure(dtype)
    yield Row(f"read {dtype}", limit.bytes_per_s / 1e9, "GB/s")
    yield Row(f"matmul {dtype}", limit.flops_per_s / 1e9, "GFLOP/s")
    contenders = (
        TwophaseContender(directory, dtype),
        TransformersContender(directory, dtype),
    )
    for case in CASES:
        ours, theirs = _median_rates(case, contenders, turns)
        name = f"{case.name} {dtype}"
        bound = limit.tokens_per_s(case, config, dtype.itemsize)
        yield Row(name, ours, "tokens/s", "transformers", theirs)
        yield Row(name, ours, "tokens/s", "limit of the core", bound)


def main() -> None:
    """Run every case and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or directory")
    parser.add_argument("--turns", type=int, default=3, help="counted turns of each engine")
    parser.add_argument("--dtypes", nargs="+", type=Dtype, default=list(Dtype))
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)
    directory = fetch_model(arguments.model)
    rows = [row for dtype in arguments.dtypes for row in _rows(directory, dtype, arguments.turns)]
    print_report("Engine on one core", rows)


if __name__ == "__main__":
    main()
