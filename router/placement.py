"""Which workers serve a request, and why, in words.

Pure: facts about the workers in, a decision out. Least loaded first: the prefill worker with the
fewest prompt tokens outstanding, the decode worker with the fewest sequences, names break ties.
A prefill worker is paired only with decode workers of its own KV layout.
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
    mode: Mode, prefill: Sequence[PrefillLoad], decode: Sequence[DecodeLoad]
) -> Placement | Rejected:
    """The least loaded workers of each phase that fit together."""
    if not decode:
        return Rejected("no decode worker is connected")
    chosen = min(decode, key=lambda worker: (worker.num_sequences, worker.name))
    load = f"{chosen.name} has {chosen.num_sequences} of {chosen.max_num_sequences} sequences"
    if mode is not Mode.DISAGGREGATED:
        return Placement(None, chosen.name, f"{load}; mode {mode} reads prompts there")
    if not prefill:
        return Rejected("no prefill worker is connected")
    fitting = [worker for worker in prefill if worker.layout == chosen.layout]
    if not fitting:
        differences = prefill[0].layout.differences(chosen.layout)
        return Rejected(f"no prefill worker fits {chosen.name}: {differences}")
    first = min(fitting, key=lambda worker: (worker.num_prompt_tokens, worker.name))
    return Placement(
        first.name,
        chosen.name,
        f"{first.name} has {first.num_prompt_tokens} prompt tokens to read; {load}",
    )
