"""How fast a card runs the model, beside what the card can do: `check`'s speeds.

The limits are measured in the same run: bytes per second of a device copy, read and written, and
the rate of one large matrix product. MFU is the share of the latter that a prefill reaches,
counting products and attention; MBU the share of the former that a decode step reaches, counting
weights and KV read once. Histories are random numbers: their values do not matter here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu.setup import Findings, Setup
from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.runner import Runner

FLOOR_MBU, FLOOR_MBU_BATCH = 0.7, 32
FLOOR_MFU, FLOOR_MFU_TOKENS = 0.5, 2048
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the card does at most, as measured."""

    bytes_per_s: float
    flops_per_s: float


def measure_limits(setup: Setup, findings: Findings, device: torch.device) -> Limits:
    """The card's copy and matrix rates."""
    source = torch.ones(setup.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = setup.seconds(lambda: target.copy_(source))
    size = setup.matrix_size
    # Zeros take less power than numbers, and so run at a higher clock.
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product_s = setup.seconds(lambda: matrix @ matrix)
    limits = Limits(2 * setup.copy_bytes / copy_s, 2.0 * size**3 / product_s)
    findings.add("copy, read and written", limits.bytes_per_s / 1e9, "GB/s")
    findings.add(f"matmul {size}, bfloat16", limits.flops_per_s / 1e12, "TFLOP/s")
    return limits


class ModelCost:
    """What a step has to read and to multiply."""

    def __init__(self, runner: Runner) -> None:
        config, layout = runner.config, runner.layout
        M, D = config.hidden_size, config.head_dim
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * D * M
        self._layers = config.num_layers * (attention + 3 * M * config.intermediate_size)
        self._head = config.vocab_size * M
        self._pair_flops = 4.0 * config.num_layers * config.num_heads * D
        self._itemsize, self._token_bytes = layout.dtype.itemsize, layout.token_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Of one prompt; the logits are those of its last token."""
        pairs = num_tokens * (num_tokens + 1) / 2
        return 2.0 * (num_tokens * self._layers + self._head) + self._pair_flops * pairs

    def decode_bytes(self, num_sequences: int, num_context_tokens: int) -> float:
        """Weights, and the KV of all sequences, once each."""
        weights = (self._layers + self._head) * self._itemsize
        return float(weights + num_sequences * num_context_tokens * self._token_bytes)


def measure_prefill(setup: Setup, findings: Findings, runner: Runner, limits: Limits) -> None:
    """Tokens per second of one prompt at a time, and MFU."""
    cost = ModelCost(runner)
    for num_tokens in setup.prefill_tokens:
        blocks = range(runner.layout.num_blocks(num_tokens))
        step = SequenceStep([7] * num_tokens, 0, blocks, GREEDY)
        seconds = setup.seconds(partial(runner.step, [step]), repeats=3)
        flops_per_s = cost.prefill_flops(num_tokens) / seconds
        findings.add(f"prefill {num_tokens}", num_tokens / seconds, "tokens/s")
        findings.add(
            f"prefill {num_tokens}: MFU",
            flops_per_s / limits.flops_per_s,
            "of matmul",
            *(("floor", FLOOR_MFU) if num_tokens == FLOOR_MFU_TOKENS else ()),
        )


def measure_decode(setup: Setup, findings: Findings, runner: Runner, limits: Limits) -> None:
    """Tokens per second of a step in a graph and in the plain loop, and MBU of the faster."""
    cost = ModelCost(runner)
    runner.cache.kv_L2NSKD.normal_()
    setup.synchronize()
    # A hook is what graphs do not have: with one the plain loop runs, and pays for being heard.
    loops: dict[str, Callable[[int], None] | None] = {"graph": None, "plain": lambda layer: None}
    for num in setup.decode_batches:
        if num * _width(setup, runner) > runner.num_blocks:
            findings.notes.append(f"decode b{num}: {runner.num_blocks} blocks do not hold it")
            continue
        # One token at one place again and again: what is read and computed is the same.
        steps = decode_steps(setup, runner, num, 0)
        seconds = {
            name: setup.seconds(partial(runner.step, steps, hook), repeats=setup.num_steps)
            for name, hook in loops.items()
        }
        graph_s, plain_s = seconds["graph"], seconds["plain"]
        findings.add(f"decode b{num}", num / graph_s, "tokens/s", "plain loop", num / plain_s)
        bytes_per_s = cost.decode_bytes(num, setup.history_tokens) / min(graph_s, plain_s)
        findings.add(
            f"decode b{num}: MBU",
            bytes_per_s / limits.bytes_per_s,
            "of copy",
            *(("floor", FLOOR_MBU) if num == FLOOR_MBU_BATCH else ()),
        )


def decode_steps(setup: Setup, runner: Runner, num: int, offset: int) -> list[SequenceStep]:
    """One token of each of num sequences, `offset` tokens behind their histories."""
    width, start = _width(setup, runner), setup.history_tokens + offset
    tables = [range(b * width, (b + 1) * width) for b in range(num)]
    return [SequenceStep([start % 200], start, table, GREEDY) for table in tables]


def _width(setup: Setup, runner: Runner) -> int:
    """Blocks of one sequence in all that is measured here."""
    return runner.layout.num_blocks(setup.history_tokens + setup.num_steps + 1)
