"""What `check` measures on: a card at full size, or the card's double at toy size.

The toy runs every line that a card would, on a CPU, so that the script is known to work before a
card is at hand; its numbers mean nothing.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch

from bench.gpu.model import LLAMA_8B, TOY, random_weights, write_model
from bench.report import Row
from core.layout import Dtype
from engine.attention.flash_double import FlashAttn2Double, FlashAttn3Double
from engine.attention.interface import ImportKernel
from engine.device import Device, open_device
from engine.device.double import HOPPER, CardDouble
from engine.runner import Runner

GIB = 1 << 30
TOY_PACKAGES: Mapping[str, object] = {
    "flash_attn": FlashAttn2Double(),
    "flash_attn_interface": FlashAttn3Double(),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of one run; picklable, since a second process measures too."""

    is_dry: bool
    model: Mapping[str, object]
    history_tokens: int
    prefill_tokens: tuple[int, ...]
    decode_batches: tuple[int, ...]
    num_steps: int
    long_prompt_tokens: int
    handoff_tokens: int
    matrix_size: int
    copy_bytes: int
    kv_cache_bytes: int
    parity_vocab: int

    @classmethod
    def of(cls, *, is_dry: bool, kv_cache_gib: float) -> "Setup":
        """A card with an 8B model, or the toy."""
        if is_dry:
            return cls(True, TOY, 64, (32, 128), (1, 2, 4), 4, 256, 128, 64, 1 << 20, 4 << 20, 256)
        sizes, batches = (512, 2048, 8192), (1, 8, 32, 128)
        cache = int(kv_cache_gib * GIB)
        return cls(
            False, LLAMA_8B, 1024, sizes, batches, 20, 8192, 2048, 8192, 4 * GIB, cache, 32_000
        )

    @property
    def model_name(self) -> str:
        """For the title."""
        return "toy" if self.is_dry else "Llama 8B, random"

    def open(self) -> Device:
        """The card, or its double."""
        if self.is_dry:
            return CardDouble(TOY_PACKAGES, num_free_bytes=1 << 30)
        return open_device("cuda:0")

    def kernels(self) -> tuple[tuple[int, int], ImportKernel]:
        """The card's compute capability, and what finds packages for it."""
        if self.is_dry:
            return HOPPER, TOY_PACKAGES.__getitem__
        return torch.cuda.get_device_capability(0), import_module

    def runner(self, device: Device, *, max_decode_sequences: int, kv_cache_bytes: int) -> Runner:
        """The random model in bfloat16, warm."""
        with tempfile.TemporaryDirectory(prefix="twophase-gpu-") as directory:
            runner = Runner(
                write_model(Path(directory), dict(self.model)),
                dtype=Dtype.BFLOAT16,
                num_threads=1,
                kv_cache_bytes=kv_cache_bytes,
                max_context_tokens=max(self.prefill_tokens) + 512,
                max_decode_sequences=max_decode_sequences,
                device=device,
                load=random_weights,
            )
        runner.warm_up(max(self.prefill_tokens))
        return runner

    def synchronize(self) -> None:
        """Wait for everything that was started on the card."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """The median of a few repeats, after one that is not counted."""
        taken_s = []
        for _ in range(repeats + 1):
            self.synchronize()
            started_s = time.perf_counter()
            call()
            self.synchronize()
            taken_s.append(time.perf_counter() - started_s)
        return statistics.median(taken_s[1:])


@dataclass(slots=True)
class Findings:
    """What was measured so far, and what could not be."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, value: float, unit: str, peer: str | None = None, at: float | None = None
    ) -> None:
        """One number, beside what it is compared with."""
        self.rows.append(Row(name, value, unit, peer, at))
