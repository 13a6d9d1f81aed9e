"""One model with its cache on one device: steps in, token ids out.

Owns the composition of the engine: configuration, weights, cache, model, sampler. Knows nothing of
requests, block ownership, transfers or asyncio. One dedicated thread calls `step`; compiled kernels
and matrix products hold no GIL, so other threads of the process do I/O meanwhile. The life of a
step: steps -> `build_batch` -> `LlamaModel.forward` -> `sample` -> `StepResult`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import ConfigError, InvariantBroken
from core.layout import Dtype, KVLayout
from core.request import SamplingParams
from engine.attention import select_attention
from engine.batch import SequenceStep, build_batch
from engine.kv_cache import KVCache
from engine.model import LlamaModel
from engine.model_config import ModelConfig, load_model_config
from engine.ops import select_ops
from engine.sampler import sample
from engine.weights import load_weights, weights_hash


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per step: the sampled token id, None where no token was asked for."""

    token_ids: list[int | None]
    compute_s: float


class Runner:
    """A loaded model, ready to step.

    Attributes: config, layout, cache, num_blocks, max_context_tokens (the longest sequence it can
    run), attention_name and attention_reason. Not thread-safe: one thread at a time.
    """

    def __init__(  # noqa: PLR0913 - the seam where configuration meets the engine
        self,
        model_directory: Path,
        *,
        dtype: Dtype,
        block_size: int,
        kv_cache_bytes: int,
        num_threads: int,
        allocate: Callable[[int], torch.Tensor] | None = None,
        max_context_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Load the model and make a cache of as many blocks as `kv_cache_bytes` holds.

        allocate(num_bytes) returns the cache's memory, a flat uint8 tensor of that size (such as a
        shared-memory segment); None is ordinary memory of the device. max_context_tokens limits
        the sequences below what the model was made for.

        Raises:
            ModelError: the model cannot be read or run.
            ConfigError: `kv_cache_bytes` holds no block.
        """
        device = torch.device(device)
        self.config = load_model_config(model_directory)
        self.layout = _layout(model_directory, self.config, dtype=dtype, block_size=block_size)
        self.num_blocks = _num_blocks(self.layout, kv_cache_bytes)
        limit = self.config.max_position_embeddings
        self.max_context_tokens = min(max_context_tokens or limit, limit)
        self._device = device
        self._num_threads = num_threads
        self._thread_id: int | None = None
        self._use_threads()
        storage = allocate(self.num_blocks * self.layout.block_bytes) if allocate else None
        # Not an inference tensor: others write into the cache outside of inference mode.
        self.cache = KVCache(self.layout, self.num_blocks, storage, device)
        with torch.inference_mode():
            attention = select_attention(device, self.config.head_dim)
            self._model = LlamaModel(
                self.config,
                load_weights(model_directory, self.config, dtype, device),
                attention=attention,
                ops=select_ops(device),
                num_positions=self.max_context_tokens,
            )
        self.attention_name = attention.name
        self.attention_reason = attention.reason

    def step(
        self, steps: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Run one forward pass over `steps` and sample where they ask for it.

        on_layer(i) is called on this thread once layer i's KV of the whole batch is written.
        compute_s covers everything, ready tokens included. A step that names a block or a
        position that does not exist breaks an invariant.
        """
        started_s = time.perf_counter()
        self._use_threads()
        self._check(steps)
        with torch.inference_mode():
            block_size = self.layout.block_size
            batch = build_batch(steps, block_size=block_size, device=self._device)
            logits_BV = self._model.forward(batch, self.cache, on_layer)
            sampled = [(step.sampling, step.end) for step in steps if step.sampling is not None]
            drawn = iter(sample(logits_BV, [s for s, _ in sampled], [p for _, p in sampled]))
        token_ids = [None if step.sampling is None else next(drawn) for step in steps]
        return StepResult(token_ids, time.perf_counter() - started_s)

    def warm_up(self) -> None:
        """Compile the kernels and touch every weight: one prefill and one decode step.

        Writes scratch KV into the first blocks: called before any block is reserved. May take
        seconds where nothing is compiled yet.
        """
        num_tokens = max(1, min(self.layout.block_size, self.max_context_tokens - 1))
        greedy = SamplingParams()
        self.step([SequenceStep([0] * num_tokens, 0, [0], greedy)])
        table = range(min(2, self.num_blocks))
        start = num_tokens if len(table) == 2 else num_tokens - 1
        self.step([SequenceStep([0], start, table, greedy)])

    def _use_threads(self) -> None:
        """Set torch's thread count, which each new thread of the process starts without."""
        if self._thread_id != threading.get_ident():
            self._thread_id = threading.get_ident()
            torch.set_num_threads(self._num_threads)

    def _check(self, steps: Sequence[SequenceStep]) -> None:
        # Compiled kernels check no bounds: a wrong index would corrupt other requests.
        for step in steps:
            if not 0 <= step.start < step.end <= self.max_context_tokens:
                raise InvariantBroken(
                    f"a step over tokens [{step.start}, {step.end}) of a context of at most "
                    f"{self.max_context_tokens}"
                )
            num_needed = self.layout.num_blocks(step.end)
            if len(step.block_table) < num_needed:
                raise InvariantBroken(f"{num_needed} blocks needed, {len(step.block_table)} given")
            if min(step.block_table) < 0 or max(step.block_table) >= self.num_blocks:
                raise InvariantBroken(f"a block table outside [0, {self.num_blocks})")


def _layout(directory: Path, config: ModelConfig, *, dtype: Dtype, block_size: int) -> KVLayout:
    return KVLayout(
        weights_hash=weights_hash(directory),
        dtype=dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _num_blocks(layout: KVLayout, kv_cache_bytes: int) -> int:
    num_blocks = kv_cache_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            "kv_cache_bytes",
            f"{kv_cache_bytes} bytes hold no block: one block of {layout.block_size} tokens "
            f"takes {layout.block_bytes} bytes",
        )
    return num_blocks
