"""A decoder-only transformer of the Llama family over a paged KV cache.

Owns the forward pass: embedding, layers, the logits of the rows that are sampled. Knows nothing of
requests, block ownership or transfers; a caller may watch the layers through `on_layer`. The
residual stream is float32, matrix products are in the model's format. With tensor parallelism each
rank runs this on its shard, and the counts below are the shard's. Letters: B sampled rows,
T tokens in the flattened batch, H query heads, K key/value heads, X = H + 2K, D head size, M model
width, V vocabulary, P positions, C = D / 2 frequencies, N blocks, S slots.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import Attention
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.linear import Linear
from engine.model_config import ModelConfig, RopeScaling
from engine.ops import Ops
from engine.parallel import Parallel
from engine.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, its matrices ready to multiply; norm weights are float32."""

    input_norm_M: torch.Tensor
    qkv: Linear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output: Linear
    post_norm_M: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def prepare(cls, weights: LayerWeights) -> "Layer":
        """The layer with its matrices packed."""
        return cls(
            input_norm_M=weights.input_norm_M,
            qkv=Linear(weights.qkv_OI, weights.qkv_bias_O),
            q_norm_D=weights.q_norm_D,
            k_norm_D=weights.k_norm_D,
            output=Linear(weights.output_OI),
            post_norm_M=weights.post_norm_M,
            gate_up=Linear(weights.gate_up_OI),
            down=Linear(weights.down_OI),
        )


class LlamaModel:
    """Llama, Mistral, Qwen2 and Qwen3: one structure, with a bias or q/k norms where they have it.

    Not thread-safe: one thread at a time runs `forward`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        attention: Attention,
        ops: Ops,
        parallel: Parallel,
        num_positions: int,
    ) -> None:
        """Take `weights` over: each layer is packed and its plain matrices are dropped.

        num_positions is the length of the longest sequence that will ever be run.
        """
        self.config = config
        self.attention = attention
        self._ops = ops
        self._parallel = parallel
        self._embedding_VM = weights.embedding_VM
        self._final_norm_M = weights.final_norm_M
        self._lm_head = Linear(weights.lm_head_VM)
        self._layers = [Layer.prepare(weights.layers.pop(0)) for _ in range(config.num_layers)]
        self._angles_P2C = rotary_angles(config, num_positions).to(weights.embedding_VM.device)

    def forward(
        self, batch: Batch, cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor | None:
        """Logits of the batch's sampled rows, of shape (B, V), in the format of the weights.

        None on all ranks but the first. Writes the KV of every token of the batch into its slot;
        on_layer(i) is called, on this thread, as soon as that of layer i is written on all ranks.
        """
        config, ops, parallel = self.config, self._ops, self._parallel
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        delta_TM = F.embedding(batch.token_ids_T, self._embedding_VM)
        residual_TM = torch.zeros(delta_TM.shape, dtype=torch.float32, device=delta_TM.device)
        for index, layer in enumerate(self._layers):
            kv_2NSKD = cache.layer(index)
            qkv_TXD = self._project(layer, delta_TM, residual_TM)
            ops.rotate_and_write(qkv_TXD, self._angles_P2C, batch, kv_2NSKD)
            if on_layer is not None and parallel.size == 1:
                on_layer(index)
            q_THD, k_TKD, v_TKD = torch.split(qkv_TXD, heads, dim=1)
            out_THD = self.attention.paged_attention(q_THD, k_TKD, v_TKD, kv_2NSKD, batch)
            if index == config.num_layers - 1:  # only the sampled rows go on from here
                out_THD = out_THD[batch.sampled_rows]
                residual_TM = residual_TM[batch.sampled_rows]
            delta_TM = parallel.all_reduce(layer.output(out_THD.flatten(1)))
            if on_layer is not None and parallel.size > 1:  # the sum proves that all ranks wrote
                on_layer(index)
            delta_TM = parallel.all_reduce(self._feed_forward(layer, delta_TM, residual_TM))
        final_BM = ops.add_rms_norm(delta_TM, residual_TM, self._final_norm_M, config.rms_norm_eps)
        logits_BV = parallel.gather(self._lm_head(final_BM))
        return None if logits_BV is None else logits_BV[:, : config.vocab_size]

    def _project(
        self, layer: Layer, delta_TM: torch.Tensor, residual_TM: torch.Tensor
    ) -> torch.Tensor:
        """qkv_TXD of the normed residual, q and k with their own norms where the model has them."""
        eps, H, K = self.config.rms_norm_eps, self.config.num_heads, self.config.num_kv_heads
        normed_TM = self._ops.add_rms_norm(delta_TM, residual_TM, layer.input_norm_M, eps)
        qkv_TXD = layer.qkv(normed_TM).view(-1, H + 2 * K, self.config.head_dim)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            self._ops.head_rms_norm(qkv_TXD[:, :H], layer.q_norm_D, eps)
            self._ops.head_rms_norm(qkv_TXD[:, H : H + K], layer.k_norm_D, eps)
        return qkv_TXD

    def _feed_forward(
        self, layer: Layer, delta_TM: torch.Tensor, residual_TM: torch.Tensor
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        normed_TM = self._ops.add_rms_norm(delta_TM, residual_TM, layer.post_norm_M, eps)
        return layer.down(self._ops.silu_mul(layer.gate_up(normed_TM)))


def rotary_angles(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """Cosine and sine per position and frequency, float32, of shape (P, 2, C).

    RoFormer (Su et al. 2021), s.3.2; scaling as `RopeScaling` names it.
    """
    exponents_C = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies_C = _scaled(1.0 / config.rope_theta**exponents_C, config.rope_scaling)
    angles_PC = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_C
    return torch.stack([angles_PC.cos(), angles_PC.sin()], dim=1)


def _scaled(frequencies_C: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    """Frequencies stretched for longer contexts; llama3 leaves the fast ones as they are."""
    if scaling is None:
        return frequencies_C
    if scaling.kind == "linear":
        return frequencies_C / scaling.factor
    turns_C = scaling.original_max_position_embeddings * frequencies_C / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_C = ((turns_C - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_C * (share_C + (1.0 - share_C) / scaling.factor)
