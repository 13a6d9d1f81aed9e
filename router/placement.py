"""Which workers serve a request, and why, in words.

Pure: facts about the workers in, a decision out. Least loaded first: the prefill worker with the
fewest prompt tokens outstanding, the decode worker with the fewest sequences, names break ties.
A prefill worker is paired only with decode workers whose KV blocks its own can become.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.config import Mode
from core.layout import KVLayout
from core.request import WorkerName


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker that can be used, and what this router has given it."""

    name: WorkerName
    layout: KVLayout
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode worker that can be used, and what this router has given it."""

    name: WorkerName
    layout: KVLayout
    num_sequences: int
    max_num_sequences: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is served; prefill None means that the decode worker reads the prompt."""

    prefill: WorkerName | None
    decode: WorkerName
    why: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """No worker can serve a request now."""

    why: str


def place(
    mode: Mode,
    prefill: Sequence[PrefillLoad],
    decode: Sequence[DecodeLoad],
    *,
    may_convert_dtype: bool = False,
) -> Placement | Rejected:
    """The least loaded workers of each phase that fit together."""
    if not decode:
        return Rejected("no decode worker is connected")
    if mode is not Mode.DISAGGREGATED:
        chosen = _least_loaded(decode)
        return Placement(None, chosen.name, f"{_load(chosen)}; mode {mode} reads prompts there")
    if not prefill:
        return Rejected("no prefill worker is connected")

    def obstacles(reader: PrefillLoad, worker: DecodeLoad) -> str:
        return reader.layout.obstacles(worker.layout, may_convert_dtype=may_convert_dtype)

    fitting = [d for d in decode if any(not obstacles(p, d) for p in prefill)]
    if not fitting:
        problem = obstacles(prefill[0], decode[0])
        return Rejected(f"no prefill worker fits {decode[0].name}: {problem}")
    chosen = _least_loaded(fitting)
    first = min(
        (worker for worker in prefill if not obstacles(worker, chosen)),
        key=lambda worker: (worker.num_prompt_tokens, worker.name),
    )
    return Placement(
        first.name,
        chosen.name,
        f"{first.name} has {first.num_prompt_tokens} prompt tokens to read; {_load(chosen)}",
    )


def _least_loaded(workers: Sequence[DecodeLoad]) -> DecodeLoad:
    return min(workers, key=lambda worker: (worker.num_sequences, worker.name))


def _load(worker: DecodeLoad) -> str:
    return f"{worker.name} has {worker.num_sequences} of {worker.max_num_sequences} sequences"
