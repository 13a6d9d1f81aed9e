"""One model with its cache on one device: steps in, token ids out.

Owns the composition of the engine: configuration, weights, cache, model, sampler. Knows nothing of
requests, block ownership, transfers or asyncio. One dedicated thread calls `step`; compiled kernels
and matrix products hold no GIL, so other threads of the process do I/O meanwhile. The life of a
step: steps -> `build_batch` -> `LlamaModel.forward` -> `sample` -> `StepResult`.

With tensor parallelism (`engine.leader`) each rank has a runner on its shard of weights and cache;
that of rank 0 announces each step to the others, which only `follow`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import ConfigError, InvariantBroken, PeerLost
from core.layout import Dtype, KVLayout
from core.request import SamplingParams
from engine.attention import select_attention
from engine.batch import SequenceStep, build_batch
from engine.kv_cache import KVCache
from engine.model import LlamaModel
from engine.model_config import ModelConfig, load_model_config
from engine.ops import select_ops
from engine.parallel import Parallel, SingleRank, TensorParallel
from engine.sampler import sample
from engine.shard import shard_of
from engine.step_words import decode_steps, encode_steps
from engine.weights import load_weights, weights_hash


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per step: the sampled token id, None where no token was asked for."""

    token_ids: list[int | None]
    compute_s: float


class Runner:
    """A loaded model, ready to step.

    Attributes: config and layout (of the whole model), cache (of this rank), storage (the memory of
    all ranks' caches, rank by rank, where it was lent), num_blocks, max_context_tokens (the longest
    sequence it can run), attention_name and attention_reason. Not thread-safe: one thread at a
    time.
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
        parallel: TensorParallel | None = None,
    ) -> None:
        """Load the model and make a cache of as many blocks as `kv_cache_bytes` holds.

        kv_cache_bytes are those of all ranks together. allocate(num_bytes) returns their memory, a
        flat uint8 tensor of that size (such as a shared-memory segment), of which this rank takes
        its part; None is ordinary memory of the device, for this rank alone. max_context_tokens
        limits the sequences below what the model was made for. parallel None is one rank.

        Raises:
            ModelError: the model cannot be read or run.
            ConfigError: `kv_cache_bytes` holds no block, or the model cannot be divided among
                the ranks.
        """
        self._parallel: Parallel = parallel or SingleRank()
        rank, size = self._parallel.rank, self._parallel.size
        device = torch.device(device)
        self.config = load_model_config(model_directory)
        self.layout = _layout(
            model_directory, self.config, dtype=dtype, block_size=block_size, size=size
        )
        shard = shard_of(self.config, self.layout, rank)
        self.num_blocks = _num_blocks(self.layout, kv_cache_bytes)
        limit = self.config.max_position_embeddings
        self.max_context_tokens = min(max_context_tokens or limit, limit)
        self._device = device
        self._num_threads = num_threads
        self._thread_id: int | None = None
        self._use_threads()
        rank_bytes = self.num_blocks * self.layout.rank_block_bytes
        self.storage = allocate(size * rank_bytes) if allocate else None
        # Not an inference tensor: others write into the cache outside of inference mode.
        mine = self.storage[rank * rank_bytes :] if self.storage is not None else None
        self.cache = KVCache(self.layout, self.num_blocks, mine, device)
        with torch.inference_mode():
            attention = select_attention(device, self.config.head_dim)
            self._model = LlamaModel(
                shard.config,
                load_weights(model_directory, shard, dtype, device),
                attention=attention,
                ops=select_ops(device),
                parallel=self._parallel,
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

        Raises:
            PeerLost: another rank died or fell silent: the worker cannot go on.
        """
        started_s = time.perf_counter()
        self._use_threads()
        self._check(steps)
        with torch.inference_mode():
            if self._parallel.size > 1:
                self._parallel.announce(encode_steps(steps))
            logits_BV = self._forward(steps, on_layer)
            assert logits_BV is not None, "only rank 0 steps"
            sampled = [(step.sampling, step.end) for step in steps if step.sampling is not None]
            drawn = iter(sample(logits_BV, [s for s, _ in sampled], [p for _, p in sampled]))
        token_ids = [None if step.sampling is None else next(drawn) for step in steps]
        return StepResult(token_ids, time.perf_counter() - started_s)

    def follow(self, words: torch.Tensor) -> None:
        """Compute this rank's share of the step that rank 0 announced with `words`."""
        self._use_threads()
        with torch.inference_mode():
            self._forward(decode_steps(words), None)

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

    def _forward(
        self, steps: Sequence[SequenceStep], on_layer: Callable[[int], None] | None
    ) -> torch.Tensor | None:
        try:
            batch = build_batch(steps, block_size=self.layout.block_size, device=self._device)
            return self._model.forward(batch, self.cache, on_layer)
        except PeerLost:
            raise
        except Exception as error:
            if self._parallel.size == 1:
                raise
            # The others are in the middle of this step: their next sum would meet another one.
            raise InvariantBroken(f"rank {self._parallel.rank} is out of step: {error}") from error

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


def _layout(
    directory: Path, config: ModelConfig, *, dtype: Dtype, block_size: int, size: int
) -> KVLayout:
    return KVLayout(
        weights_hash=weights_hash(directory),
        dtype=dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tensor_parallel_size=size,
    )


def _num_blocks(layout: KVLayout, kv_cache_bytes: int) -> int:
    block_bytes = layout.tensor_parallel_size * layout.rank_block_bytes
    num_blocks = kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            "kv_cache_bytes",
            f"{kv_cache_bytes} bytes hold no block: one block of {layout.block_size} tokens "
            f"takes {block_bytes} bytes",
        )
    return num_blocks
