"""Which workers serve a request, and why, in words.

Pure: facts about the workers in, a decision out. Least loaded first: the prefill worker with the
fewest prompt tokens outstanding, the decode worker with the fewest sequences, names break ties.
A prefill worker is paired only with decode workers whose KV blocks its own can become. Where no
prefill worker can serve, a decode worker reads the prompt itself if the caller may recompute.
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
    incarnation: str
    layout: KVLayout
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode worker that can be used, and what this router has given it."""

    name: WorkerName
    incarnation: str
    layout: KVLayout
    num_sequences: int
    max_num_sequences: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is served; prefill None means that the decode worker reads the prompt."""

    prefill: WorkerName | None
    decode: WorkerName
    why: str
    prefill_incarnation: str = ""
    decode_incarnation: str = ""


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
    may_recompute: bool = False,
) -> Placement | Rejected:
    """The least loaded workers of each phase that fit together."""
    if not decode:
        return Rejected("no decode worker can be used")
    if mode is not Mode.DISAGGREGATED:
        return _at_decode(decode, f"mode {mode} reads prompts there")
    if not prefill:
        why = "no prefill worker can be used"
        return (
            _at_decode(decode, f"{why}, so it reads the prompt") if may_recompute else Rejected(why)
        )

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
        first.incarnation,
        chosen.incarnation,
    )


def _at_decode(decode: Sequence[DecodeLoad], why: str) -> Placement:
    chosen = _least_loaded(decode)
    why = f"{_load(chosen)}; {why}"
    return Placement(None, chosen.name, why, decode_incarnation=chosen.incarnation)


def _least_loaded(workers: Sequence[DecodeLoad]) -> DecodeLoad:
    return min(workers, key=lambda worker: (worker.num_sequences, worker.name))


def _load(worker: DecodeLoad) -> str:
    return f"{worker.name} has {worker.num_sequences} of {worker.max_num_sequences} sequences"
