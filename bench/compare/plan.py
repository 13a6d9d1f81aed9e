"""What a comparison is to play: workloads, the cores they are played on, and what counts as good.

A plan is a YAML of its own; the command line makes one of its options where no file is given.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from core.config import EngineConfig, Mode
from core.errors import ConfigError
from core.layout import Dtype
from core.model_path import DEFAULT_MODEL
from core.settings.file import apply_override, errors_of, read_tree

WAYS = (Mode.COLOCATED, Mode.CHUNKED, Mode.DISAGGREGATED)

Seconds = Annotated[float, Field(gt=0, le=3600)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class WorkloadPlan(_Section):
    """Requests of one kind: from a trace, of fixed lengths, or from a file of prompts."""

    name: str = Field(default="workload", pattern=r"^[A-Za-z0-9._-]+$", max_length=64)
    """In headings and file names."""
    trace: Path | None = None
    """Azure CSV or Mooncake JSON lines: lengths, arrivals, and which prompts begin alike."""
    prompts: Path | None = None
    """Text, one prompt a line."""
    input_tokens: int | None = Field(default=None, ge=1)
    """Length of every prompt; without trace and prompts."""
    output_tokens: int = Field(default=64, ge=1)
    """Length of every answer; a trace brings its own."""
    requests_per_s: float | None = Field(default=None, gt=0, le=10_000)
    """Poisson arrivals at this rate, the requests drawn at random from the trace; default: a
    trace's own order and arrivals, and 1 a second without a trace."""
    rate: float = Field(default=1.0, gt=0)
    """Times the trace's own arrival rate; not with requests_per_s."""
    divide: int = Field(default=1, ge=1, le=512)
    """Divides the lengths of a trace (and its blocks of shared prompts)."""
    divide_output: int | None = Field(default=None, ge=1, le=512)
    """Divides the lengths of its answers; default: as divide."""
    max_input_tokens: int = Field(default=4096, ge=1)
    """Longer prompts are cut."""
    max_output_tokens: int = Field(default=512, ge=1)
    """Longer answers are cut."""
    duration_s: Seconds = 30.0
    """Arrivals of one round end after this."""
    max_requests: int = Field(default=1000, ge=1, le=100_000)
    """Of one round, at most."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = (self.trace, self.prompts, self.input_tokens)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("a workload has one of trace, prompts and input_tokens")
        if self.trace is None and (self.rate, self.divide, self.divide_output) != (1.0, 1, None):
            raise ValueError("rate, divide and divide_output are of a trace, and there is none")
        if self.requests_per_s is not None and self.rate != 1.0:
            raise ValueError("requests_per_s replaces the trace's arrivals: rate has no effect")
        return self


class SloPlan(_Section):
    """What counts as a good answer in absolute terms; it has to keep all three."""

    ttft_s: Seconds = 2.0
    """To the first token."""
    tpot_s: Seconds = 0.15
    """Mean time per output token."""
    itl_s: Seconds = 0.5
    """99th percentile of the answer's own gaps between tokens."""


class CrossoverPlan(_Section):
    """Prompts of growing length beside running streams."""

    input_tokens: tuple[int, ...] = (128, 512, 1024, 2048)
    """Rising lengths of the prompts."""
    streams: int = Field(default=8, ge=1, le=256)
    """Answers that run meanwhile."""
    quiet_s: Annotated[float, Field(gt=0, le=60)] = 0.7
    """Before and after each prompt, so that streams show their own pace."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        lengths = self.input_tokens
        if len(lengths) < 2 or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError("input_tokens needs two lengths or more, each greater than the last")
        return self


class ComparePlan(_Section):
    """A whole comparison."""

    workloads: tuple[WorkloadPlan, ...] = Field(min_length=1, max_length=16)
    """Played one after another."""
    ways: tuple[Mode, ...] = Field(default=WAYS, min_length=1)
    """Modes that take turns."""
    model: str = DEFAULT_MODEL
    """A known name, a Hugging Face id, or a local directory."""
    engine: EngineConfig = EngineConfig(dtype=Dtype.BFLOAT16)
    """As in a cluster's YAML."""
    workers: int = Field(default=2, ge=2, le=1024)
    """Workers of each way, with `threads` threads each."""
    prefill_workers: int | None = Field(default=None, ge=1)
    """How many of them read prompts in mode disaggregated; default: half."""
    threads: int = Field(default=1, ge=1, le=256)
    """Compute threads of one worker."""
    cores: tuple[int, ...] | None = None
    """Cores for the compute threads, the same for all ways; default: the first that there are, if
    there are enough."""
    kv_cache: ByteSize = ByteSize(512 << 20)
    """Memory for the KV blocks of one worker."""
    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens of one step in mode chunked."""
    rounds: int = Field(default=2, ge=1, le=100)
    """How often each way plays each workload; the order rotates."""
    timeout_s: Seconds = 60.0
    """A request that takes longer has failed."""
    seed: int = 1
    """Of arrivals, of the choice of requests, and of the prompts' tokens."""
    slo: SloPlan = SloPlan()
    crossover: CrossoverPlan | None = CrossoverPlan()
    """null leaves the crossover out."""

    @model_validator(mode="after")
    def _workers_suffice(self) -> Self:
        if self.num_prefill_workers >= self.workers:
            raise ValueError(
                f"prefill_workers is {self.num_prefill_workers} of {self.workers} workers: decode "
                "needs one, too"
            )
        needed = self.workers * self.threads
        if self.cores is not None and len(self.cores) != needed:
            raise ValueError(f"cores names {len(self.cores)}; all threads take {needed}")
        if len({workload.name for workload in self.workloads}) < len(self.workloads):
            raise ValueError("two workloads have the same name")
        if len(set(self.ways)) < len(self.ways):
            raise ValueError("ways names a mode twice")
        return self

    @property
    def num_prefill_workers(self) -> int:
        """Of mode disaggregated."""
        return self.prefill_workers or self.workers // 2


def load_plan(
    path: Path | None, overrides: Sequence[str], workload: dict[str, object]
) -> ComparePlan:
    """The plan of a file, or of one workload, with `key=value` overrides.

    Args:
        path: the YAML; relative paths in it are seen from where it lies.
        overrides: keys dotted; without a file also keys of the workload.
        workload: fields of the only workload; of no effect, and refused, beside a file.

    Raises:
        ConfigError: with the path of the key that is wrong.
    """
    if path is not None and workload:
        raise ConfigError(next(iter(workload)), f"has no effect beside {path}, which names its own")
    if path is None and not workload:
        raise ConfigError("workload", "give a plan, or one of --trace, --prompts and --input")
    tree = read_tree(path) if path is not None else {"workloads": [workload]}
    for override in overrides:
        key = override.partition("=")[0]
        is_of_workload = path is None and key in WorkloadPlan.model_fields
        apply_override(workload if is_of_workload else tree, override)
    try:
        plan = ComparePlan.model_validate(tree)
    except ValidationError as error:
        raise errors_of(error, ComparePlan)[0] from error
    directory = path.parent if path is not None else Path()
    workloads = tuple(_seen_from(directory, workload) for workload in plan.workloads)
    return plan.model_copy(update={"workloads": workloads})


def _seen_from(directory: Path, workload: WorkloadPlan) -> WorkloadPlan:
    paths = {"trace": workload.trace, "prompts": workload.prompts}
    found = {key: directory / path for key, path in paths.items() if path is not None}
    for key, path in found.items():
        if not path.is_file():
            raise ConfigError(f"workloads.{workload.name}.{key}", f"there is no file {path}")
    return workload.model_copy(update=found)
