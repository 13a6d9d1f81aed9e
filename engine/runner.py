"""One model with its cache on one device: steps in, token ids out.

Owns the composition of the engine: configuration, weights, cache, model, sampler. Knows nothing of
requests, block ownership, transfers or asyncio. One dedicated thread calls `step`; compiled kernels
and matrix products hold no GIL, so other threads of the process do I/O meanwhile. The life of a
step: steps -> `build_batch` -> `LlamaModel.forward` -> `sample` -> `StepResult`; on a card, decode
steps take `DecodeGraphs` in the place of the second and third. What else differs there is behind
`Device`.

With tensor parallelism (`engine.leader`) each rank has a runner on its shard of weights and cache;
that of rank 0 announces each step to the others, which only `follow`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from core.errors import InvariantBroken, PeerLost
from core.layout import Dtype, KVLayout
from core.request import SamplingParams
from engine.attention import AttentionNeeds
from engine.batch import Batch, SequenceStep, StepResult, build_batch
from engine.decode_graph import DecodeGraphs, rungs_of
from engine.device import Device, HostDevice, fitting
from engine.kv_cache import TORCH_DTYPES, KVCache, num_cache_blocks
from engine.model import LlamaModel
from engine.model_config import load_model_config
from engine.ops import select_ops
from engine.parallel import Parallel, SingleRank, TensorParallel
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import sampled_tokens
from engine.shard import shard_of
from engine.step_words import decode_steps, encode_steps
from engine.weights import LoadWeights, load_weights, weights_hash


class Runner:
    """A loaded model, ready to step.

    Attributes: config and layout (of the whole model), cache (of this rank), storage (the memory of
    all ranks' caches, rank by rank, where it was lent), num_blocks (those that sequences may have;
    the cache may hold a scratch block behind them), max_context_tokens (the longest sequence it can
    run), load_s (what it took until it was warm, where that was measured). Not thread-safe: one
    thread at a time.
    """

    def __init__(  # noqa: PLR0913 - the seam where configuration meets the engine
        self,
        model_directory: Path,
        *,
        dtype: Dtype,
        num_threads: int,
        block_size: int | None = None,
        kv_cache_bytes: int | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
        max_context_tokens: int | None = None,
        max_decode_sequences: int = 0,
        device: Device | None = None,
        parallel: TensorParallel | None = None,
        load: LoadWeights = load_weights,
    ) -> None:
        """Load the model and make a cache of as many blocks as `kv_cache_bytes` holds.

        block_size None is what the attention takes best. kv_cache_bytes are those of all ranks
        together; None leaves it to `num_cache_blocks`. allocate(num_bytes) returns the memory of
        all ranks' caches, a flat uint8 tensor of that size (such as a shared-memory segment), of
        which this rank takes its part; None is ordinary memory of the device, for this rank alone.
        max_context_tokens limits the sequences below what the model was made for. Decode steps of
        up to max_decode_sequences become graphs where the device has them; with several ranks none
        do. device None is the CPU, parallel None is one rank. load(directory, shard, dtype,
        torch_device) brings the weights.

        Raises:
            ModelError: the model cannot be read or run.
            ConfigError: `kv_cache_bytes` holds no block or does not fit, the attention kernel does
                not take `block_size`, or the model cannot be divided among the ranks.
        """
        self.load_s = 0.0
        self._parallel: Parallel = parallel or SingleRank()
        self._device = device or HostDevice()
        self._num_threads = num_threads
        self._thread_id: int | None = None
        self._use_threads()
        self.config = load_model_config(model_directory)
        self._attention = self._device.select_attention(self._needs(dtype, block_size))
        self.layout = KVLayout(
            weights_hash=weights_hash(model_directory),
            dtype=dtype,
            block_size=self._attention.block_size,
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            tensor_parallel_size=self._parallel.size,
        )
        self._grammars = Grammars(model_directory, self.config.vocab_size)
        limit = self.config.max_position_embeddings
        self.max_context_tokens = min(max_context_tokens or limit, limit)
        has_graphs = bool(max_decode_sequences) and self._parallel.size == 1
        self._maker = self._device.graphs if has_graphs else None
        self._max_decode_sequences = max_decode_sequences
        if kv_cache_bytes is not None:  # before weights are read for nothing
            self._num_cache_blocks(kv_cache_bytes, None)
        with self._device.computing():
            with fitting("the model", "engine.device"):
                self._model = self._load(model_directory, load)
            self._make_cache(kv_cache_bytes, allocate)
        self._graphs = DecodeGraphs(
            self._decode_logits,
            self._device,
            block_size=self.layout.block_size,
            scratch_block=self.num_blocks,
        )

    @property
    def kernels(self) -> str:
        """What computes attention and decode steps here, and why, in words."""
        attention = f"{self._attention.name}: {self._attention.reason}"
        if self._maker is not None:
            return f"{attention}; {self._graphs.reason}"
        if self._max_decode_sequences and self._device.graphs is not None:
            why = f"graphs are for one rank, this worker has {self._parallel.size}"
            return f"{attention}; decode step by step: {why}"
        return attention

    def step(
        self, steps: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Run one forward pass over `steps` and sample where they ask for it.

        on_layer(i) is called once layer i's KV of the whole batch is written, in order and before
        this returns; on a card by another thread, when the card is done with it. compute_s covers
        everything, ready tokens included. A step that names a block or a position that does not
        exist breaks an invariant.

        Raises:
            PeerLost: another rank died or fell silent: the worker cannot go on.
        """
        started_s = time.perf_counter()
        self._use_threads()
        self._check(steps)
        masks = self._grammars.masks(steps)
        with self._device.computing(), torch.inference_mode():
            if self._parallel.size > 1:
                self._parallel.announce(encode_steps(steps))
            logits_BV = self._forward(steps, on_layer)
            assert logits_BV is not None, "only rank 0 steps"
            drawn = sampled_tokens(logits_BV, steps, masks)
        return replace(drawn, compute_s=time.perf_counter() - started_s)

    def follow(self, words: torch.Tensor) -> None:
        """Compute this rank's share of the step that rank 0 announced with `words`."""
        self._use_threads()
        with self._device.computing(), torch.inference_mode():
            self._forward(decode_steps(words), None)

    def warm_up(self, num_tokens: int = 0) -> None:
        """Compile the kernels, touch every weight and capture the graphs.

        Runs one prefill and one decode step, and if it is more, a prefill of num_tokens, the most
        that a step will have. Writes scratch KV into the first blocks: called before any block is
        reserved. May take seconds where nothing is compiled yet.

        Raises:
            ConfigError: a step of num_tokens does not fit into the card's memory.
        """
        size = self.layout.block_size
        num_first = max(1, min(size, self.max_context_tokens - 1))
        greedy = SamplingParams()
        self.step([SequenceStep([0] * num_first, 0, [0], greedy)])
        table = range(min(2, self.num_blocks))
        start = num_first if len(table) == 2 else num_first - 1
        self.step([SequenceStep([0], start, table, greedy)])
        if num_tokens > num_first:
            with fitting(f"a step of {num_tokens} tokens", "max_batch_tokens"):
                self.step(self._prompts_of(num_tokens))
        if self._maker is not None:
            width = self.layout.num_blocks(self.max_context_tokens)
            rungs = rungs_of(self._attention, self._max_decode_sequences, width)
            with self._device.computing(), torch.inference_mode():
                self._graphs.capture(rungs, self._maker)

    def _prompts_of(self, num_tokens: int) -> list[SequenceStep]:
        """Prompts as long as they may be, with num_tokens together, over the same blocks."""
        longest = min(self.max_context_tokens, self.num_blocks * self.layout.block_size)
        lengths = [longest] * (num_tokens // longest) + [num_tokens % longest]
        return [
            SequenceStep([0] * length, 0, range(self.layout.num_blocks(length)), None)
            for length in lengths
            if length
        ]

    def _needs(self, dtype: Dtype, block_size: int | None) -> AttentionNeeds:
        size = self._parallel.size
        return AttentionNeeds(
            device=self._device.torch_device,
            dtype=TORCH_DTYPES[dtype],
            num_heads=max(1, self.config.num_heads // size),
            num_kv_heads=max(1, self.config.num_kv_heads // size),
            head_dim=self.config.head_dim,
            block_size=block_size,
        )

    def _load(self, directory: Path, load: LoadWeights) -> LlamaModel:
        shard = shard_of(self.config, self.layout, self._parallel.rank)
        device = self._device.torch_device
        with torch.inference_mode():
            return LlamaModel(
                shard.config,
                load(directory, shard, self.layout.dtype, device),
                attention=self._attention,
                ops=select_ops(device),
                parallel=self._parallel,
                num_positions=self.max_context_tokens,
            )

    def _make_cache(
        self, kv_cache_bytes: int | None, allocate: Callable[[int], torch.Tensor] | None
    ) -> None:
        """Set num_blocks, storage and cache."""
        free_bytes = self._device.free_bytes()
        if free_bytes is not None:
            free_bytes = self._parallel.smallest(free_bytes)
        num_blocks = self._num_cache_blocks(kv_cache_bytes, free_bytes)
        self.num_blocks = num_blocks - self._num_scratch_blocks
        rank_bytes, rank = num_blocks * self.layout.rank_block_bytes, self._parallel.rank
        self.storage = allocate(self._parallel.size * rank_bytes) if allocate else None
        # Not an inference tensor: others write into the cache outside of inference mode.
        mine = self.storage[rank * rank_bytes :] if self.storage is not None else None
        with fitting("the KV cache", "kv_cache"):
            self.cache = KVCache(self.layout, num_blocks, mine, self._device.torch_device)

    @property
    def _num_scratch_blocks(self) -> int:
        return int(self._maker is not None)

    def _num_cache_blocks(self, kv_cache_bytes: int | None, free_bytes: int | None) -> int:
        return num_cache_blocks(
            self.layout,
            kv_cache_bytes=kv_cache_bytes,
            free_bytes=free_bytes,
            num_scratch_blocks=self._num_scratch_blocks,
        )

    def _forward(
        self, steps: Sequence[SequenceStep], on_layer: Callable[[int], None] | None
    ) -> torch.Tensor | None:
        try:
            if on_layer is None:
                logits_BV = self._graphs.logits(steps)
                if logits_BV is not None:
                    return logits_BV
            size = self.layout.block_size
            batch = build_batch(steps, block_size=size, upload=self._device.upload)
            return self._model.forward(batch, self.cache, self._once_written(on_layer))
        except PeerLost:
            raise
        except Exception as error:
            if self._parallel.size == 1:
                raise
            # The others are in the middle of this step: their next sum would meet another one.
            raise InvariantBroken(f"rank {self._parallel.rank} is out of step: {error}") from error

    def _decode_logits(self, batch: Batch) -> torch.Tensor:
        """What a graph captures."""
        logits_BV = self._model.forward(batch, self.cache)
        assert logits_BV is not None, "graphs are for one rank"
        return logits_BV

    def _once_written(self, on_layer: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """on_layer, told once the device has written the layer, and not when that is enqueued."""
        if on_layer is None:
            return None
        return lambda index: self._device.when_written(partial(on_layer, index))

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
