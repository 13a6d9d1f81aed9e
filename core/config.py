"""The one YAML file: its schema and its loader; `core.settings` holds most of its sections.

Precedence: `key=value` overrides (dotted keys), then the file, then the defaults below. Nothing is
written back: what a process discovers (ports, number of blocks) is returned, never stored here.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, ValidationError, model_validator

from core.errors import ConfigError
from core.layout import Dtype
from core.settings.chaos import ChaosConfig
from core.settings.file import apply_override, errors_of, read_tree
from core.settings.observing import TelemetryConfig, TracingConfig
from core.settings.resources import ReplicaResources
from core.settings.router import RouterConfig
from core.settings.scaling import ScalingConfig
from core.settings.section import Seconds, Section
from core.settings.security import SecurityConfig

MIB = 1 << 20


class Mode(StrEnum):
    """How the two phases share workers."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    CHUNKED = "chunked"


class EngineConfig(Section):
    """How every worker runs the model."""

    dtype: Dtype = Dtype.FLOAT32
    """Weights, activations and KV cache: float32 or bfloat16."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What computes; with cuda, each rank takes one card (see `gpus` of the pools)."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens of one KV block; default: what attention is fastest with, which is 16 on a CPU, 64
    with flash-attn 3 and 256 with flash-attn 2."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and answer together; default: what the checkpoint was trained for."""
    nice: int = Field(default=10, ge=0, le=19)
    """Added to the compute thread's niceness, so that threads that move data go first."""
    step_log: Path | None = None
    """Directory into which each worker writes, when it ends, what its last steps were; `twophase
    compare` draws them."""


class PoolConfig(Section):
    """What both pools have in common; the sizes are those of one replica."""

    replicas: int = Field(default=1, ge=1, le=1024)
    """Workers of the pool."""
    dtype: Dtype | None = None
    """Number format of this pool; default: engine.dtype."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens of one KV block of this pool; default: engine.block_size."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks of one worker: processes among which each layer's heads are divided."""
    num_threads: int = Field(default=1, ge=1, le=256)
    """Compute threads of one rank, whatever OMP_NUM_THREADS says; its actor asks Ray for as many
    CPUs."""
    cores: tuple[int, ...] | None = None
    """CPU cores for the compute threads; each rank in turn takes num_threads of them, replica by
    replica. Default: wherever the system puts them."""
    gpus: tuple[int, ...] | None = None
    """With engine.device cuda: cards, as CUDA counts those that a process sees; each rank in turn
    takes one, replica by replica. Default: rank i of every worker takes card i."""
    kv_cache: ByteSize | None = Field(default=None, ge=1)
    """Memory for the KV blocks of all ranks of a worker: bytes, or a string such as 512MiB.
    Default: 1GiB on a CPU; on cards 85 % of what is free with the weights in them."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens of one step: the chunk budget of a prefill."""
    resources: ReplicaResources = ReplicaResources()
    """What one worker takes of the nodes of a Ray cluster that it is placed on (`twophase up`)."""

    @model_validator(mode="after")
    def _gpus_suffice(self) -> Self:
        num_needed = self.replicas * self.tensor_parallel
        if self.gpus is not None and len(self.gpus) != num_needed:
            raise ValueError(
                f"gpus names {len(self.gpus)} cards; {self.replicas} replicas of "
                f"{self.tensor_parallel} ranks take {num_needed}"
            )
        return self

    @model_validator(mode="after")
    def _cores_suffice(self) -> Self:
        num_needed = self.replicas * self.num_worker_threads
        if self.cores is not None and len(self.cores) != num_needed:
            raise ValueError(
                f"cores names {len(self.cores)} cores; {self.replicas} replicas of "
                f"{self.num_worker_threads} threads take {num_needed}"
            )
        return self

    @property
    def num_worker_threads(self) -> int:
        """Compute threads of all ranks of one worker."""
        return self.tensor_parallel * self.num_threads

    def cores_of(self, replica: int) -> tuple[int, ...] | None:
        """Cores of all ranks of this replica, in order; None leaves the choice to the system."""
        if self.cores is None:
            return None
        return self.cores[replica * self.num_worker_threads :][: self.num_worker_threads]

    def gpus_of(self, replica: int) -> tuple[int, ...] | None:
        """Cards of all ranks of this replica, in order; None is card i for rank i."""
        if self.gpus is None:
            return None
        return self.gpus[replica * self.tensor_parallel :][: self.tensor_parallel]


class PrefillConfig(PoolConfig):
    """The pool that reads prompts; only in mode disaggregated."""

    max_waiting_requests: int = Field(default=1024, ge=1)
    """Prompts that one worker lets wait; more are refused."""


class DecodeConfig(PoolConfig):
    """The pool that makes tokens; in modes colocated and chunked it reads the prompts, too."""

    max_num_sequences: int = Field(default=64, ge=1)
    """Sequences of one decode step."""
    cuda_graphs: bool = True
    """With engine.device cuda and one rank: whether decode steps are captured as CUDA graphs."""
    max_waiting_requests: int = Field(default=1024, ge=1)
    """Requests that one worker lets wait for blocks; more are refused."""


class TransferConfig(Section):
    """The handoff of KV blocks from prefill to decode."""

    backend: Literal["auto", "shm", "ipc", "torch", "nixl"] = "auto"
    """shm: same host; torch: gloo between CPUs, NCCL between CUDA devices; nixl: RDMA through UCX
    (extra `rdma`); auto: per pair."""
    piece: ByteSize = Field(default=ByteSize(8 * MIB), ge=4096)
    """Most bytes that are sent and checked as one piece."""
    idle_timeout_s: Seconds = 600.0
    """A link that carried nothing for this long is closed; the next handoff makes a new one."""
    max_links: int = Field(default=256, ge=1)
    """Links of one prefill worker; the one that was idle longest makes room for a new one."""
    convert_dtype: bool = False
    """Whether KV blocks may be converted where prefill and decode have different number formats;
    tokens can then differ from those of either."""
    connect_timeout_s: Seconds = 10.0
    """Longest wait for the other end of a new link."""


class ClusterConfig(Section):
    """A whole cluster."""

    model: str = "smollm2-135m-instruct"
    """A known name, a Hugging Face id, or a local directory."""
    mode: Mode = Mode.DISAGGREGATED
    """disaggregated, colocated or chunked."""
    engine: EngineConfig = EngineConfig()
    prefill: PrefillConfig | None = None
    """Only in mode disaggregated; defaults to one worker there."""
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    security: SecurityConfig = SecurityConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    chaos: ChaosConfig = ChaosConfig()
    tracing: TracingConfig | None = None
    """Absent: no spans. See docs/timeline.md."""
    scaling: ScalingConfig | None = None
    """Absent: pools keep their `replicas`, with which they begin otherwise. See docs/scaling.md."""

    def engine_of(self, pool: PoolConfig) -> EngineConfig:
        """The engine's settings with what this pool has of its own."""
        own = {"dtype": pool.dtype, "block_size": pool.block_size}
        return self.engine.model_copy(update={k: v for k, v in own.items() if v is not None})

    @property
    def prefill_pool(self) -> PrefillConfig | None:
        """The prefill pool in force; None where decode workers read the prompts."""
        if self.mode is not Mode.DISAGGREGATED:
            return None
        return self.prefill or PrefillConfig()


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The configuration of `path` (None: the defaults) with `key=value` overrides.

    Raises:
        ConfigError: with the dotted path of the offending key and, for an unknown one, the
            nearest known key.
    """
    tree = read_tree(path) if path is not None else {}
    for override in overrides:
        apply_override(tree, override)
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise errors_of(error, ClusterConfig)[0] from error
    if config.mode is not Mode.DISAGGREGATED and config.prefill is not None:
        raise ConfigError("prefill", f"has no effect in mode {config.mode}: take it out")
    _refuse_two_formats(config)
    _refuse_unusable_cards(config)
    _refuse_unusable_scaling(config)
    return config


def problems_of(path: Path) -> list[ConfigError]:
    """Everything that is wrong with the file at `path`, as far as it can be told in one look."""
    try:
        ClusterConfig.model_validate(read_tree(path))
        load_config(path)
    except ValidationError as error:
        return errors_of(error, ClusterConfig)
    except ConfigError as error:
        return [error]
    return []


def _refuse_two_formats(config: ClusterConfig) -> None:
    pool = config.prefill_pool
    if pool is None or config.transfer.convert_dtype:
        return
    prefill, decode = config.engine_of(pool).dtype, config.engine_of(config.decode).dtype
    if prefill is not decode:
        raise ConfigError(
            "prefill.dtype",
            f"is {prefill} and decode's {decode}: transfer.convert_dtype=true allows it",
        )


def _refuse_unusable_cards(config: ClusterConfig) -> None:
    device, backend = config.engine.device, config.transfer.backend
    if {"ipc": "cuda", "shm": "cpu"}.get(backend, device) != device:
        raise ConfigError("transfer.backend", f"{backend} joins no workers on {device}", "auto")
    pools: dict[str, PoolConfig] = {"decode": config.decode}
    if config.prefill_pool is not None:
        pools["prefill"] = config.prefill_pool
    for name, pool in pools.items():
        if config.engine.device == "cpu" and pool.gpus is not None:
            raise ConfigError(f"{name}.gpus", "has no effect with engine.device cpu: take it out")
        _refuse_unusable_resources(name, pool, device)
        is_split = config.engine.device == "cuda" and pool.tensor_parallel > 1
        if is_split and config.prefill_pool is not None:
            raise ConfigError(
                f"{name}.tensor_parallel",
                f"is {pool.tensor_parallel}: on cards, KV blocks of several ranks cannot be handed "
                "over, since one rank does it and does not reach the others' cards; one rank, or "
                "mode chunked or colocated, can serve",
            )


def _refuse_unusable_resources(name: str, pool: PoolConfig, device: str) -> None:
    num_gpus = pool.resources.gpus
    if device == "cpu" and num_gpus:
        raise ConfigError(f"{name}.resources.gpus", "has no effect with engine.device cpu")
    if device == "cuda" and num_gpus is not None and num_gpus < pool.tensor_parallel:
        raise ConfigError(
            f"{name}.resources.gpus",
            f"is {num_gpus}, less than the {pool.tensor_parallel} ranks of a worker take",
        )


def _refuse_unusable_scaling(config: ClusterConfig) -> None:
    prefill, scaling = config.prefill_pool, config.scaling
    if scaling is None:
        return
    for name, pool in (("decode", config.decode), ("prefill", prefill)):
        if pool is not None and (pool.cores or pool.gpus):
            key = f"{name}.cores" if pool.cores else f"{name}.gpus"
            raise ConfigError(key, "says nothing of workers that scaling adds: take one out")
    scaling.refuse_start(prefill.replicas if prefill else None, config.decode.replicas)
