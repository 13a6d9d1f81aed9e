"""Which workers serve a request, and why, in words.

Pure: facts about the workers in, a decision out. In large pools `shortlist` says about whom.

- A worker that cannot hold the request, or has no room for it now, is left out; so is a prefill
  worker whose KV blocks cannot become those of a decode worker.
- Decode: of the workers that are almost as empty as the emptiest, the one that has most of the
  prompt cached, else the one that served the session, else the emptiest. So a popular prefix draws
  requests to its worker without piling them up there (the bounded imbalance of SGLang's
  cache-aware router; balancing against load as in Preble, 2024).
- Prefill: the least predicted wait, which is the prompt tokens before and of this request, less
  those that the worker has cached, by its measured rate.
- The decode worker reads the prompt itself where no prefill worker can and the caller may
  recompute, or, if the rules allow it, where that is measured to be sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from core.config import Mode
from core.layout import KVLayout
from core.request import RequestId, WorkerName
from router.placing.load import DecodeLoad, Need, PrefillLoad


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be done.

    may_recompute: a decode worker may read the prompt where no prefill worker can.
    max_local_tokens: uncached prompt tokens that it may read because that is sooner; 0 is never.
    """

    mode: Mode
    may_convert_dtype: bool = False
    may_recompute: bool = False
    max_local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is served; prefill None means that the decode worker reads the prompt.

    is_fallback: it does so because no prefill worker can. held_id: `prefill` is a decode worker
    that stops, and has the answer's KV cache under that id.
    """

    prefill: WorkerName | None
    decode: WorkerName
    why: str
    prefill_incarnation: str = ""
    decode_incarnation: str = ""
    is_fallback: bool = False
    held_id: RequestId | None = None


class Reason(Enum):
    """What would have to change."""

    NOBODY = "no worker can be used"
    TOO_LARGE = "no worker can hold the request"
    FULL = "every worker has enough to do"


@dataclass(frozen=True, slots=True)
class Rejected:
    """No worker can serve a request now."""

    why: str
    reason: Reason = Reason.NOBODY


def place(
    rules: Rules,
    need: Need,
    prefill: Sequence[PrefillLoad],
    decode: Sequence[DecodeLoad],
    *,
    exposed_transfer_s: float | None = None,
) -> Placement | Rejected:
    """The workers of each phase that fit together and serve the request soonest.

    exposed_transfer_s is what a handoff adds after the prompt is read, None until it was measured.
    """
    if not decode:
        return Rejected("no decode worker can be used")
    able = [d for d in decode if need.num_tokens <= d.max_num_tokens]
    if not able:
        most = max(d.max_num_tokens for d in decode)
        why = f"{need.num_tokens} tokens, and the largest decode worker holds {most}"
        return Rejected(why, Reason.TOO_LARGE)
    if rules.mode is not Mode.DISAGGREGATED:
        return _at_decode(need, able, f"mode {rules.mode} reads prompts there")
    readers = [p for p in prefill if need.num_prompt_tokens <= p.max_num_tokens]
    if not readers:
        rejected = _no_reader(need, prefill)
        if rules.may_recompute:
            why = f"{rejected.why}, so it reads the prompt"
            return _at_decode(need, able, why, is_fallback=True)
        return rejected
    return _in_two_pools(rules, need, readers, able, exposed_transfer_s)


def _no_reader(need: Need, prefill: Sequence[PrefillLoad]) -> Rejected:
    if not prefill:
        return Rejected("no prefill worker can be used")
    most = max(p.max_num_tokens for p in prefill)
    why = (
        f"a prompt of {need.num_prompt_tokens} tokens, and the largest prefill worker holds {most}"
    )
    return Rejected(why, Reason.TOO_LARGE)


def _in_two_pools(
    rules: Rules,
    need: Need,
    prefill: Sequence[PrefillLoad],
    decode: Sequence[DecodeLoad],
    exposed_transfer_s: float | None,
) -> Placement | Rejected:
    def readers_of(layout: KVLayout) -> list[PrefillLoad]:
        return [
            p
            for p in prefill
            if not p.layout.obstacles(layout, may_convert_dtype=rules.may_convert_dtype)
        ]

    readers = {layout: readers_of(layout) for layout in {d.layout for d in decode}}
    fitting = [d for d in decode if readers[d.layout]]
    if not fitting:
        layout, other = prefill[0].layout, decode[0].layout
        problem = layout.obstacles(other, may_convert_dtype=rules.may_convert_dtype)
        return Rejected(f"no prefill worker fits {decode[0].name}: {problem}")
    free = [d for d in fitting if d.has_room(need) and any(p.has_room for p in readers[d.layout])]
    if not free:
        return _full(need, fitting)
    chosen = emptiest(need, free)
    first = min(
        (p for p in readers[chosen.layout] if p.has_room),
        key=lambda p: (_wait(p, need), -p.num_cached_tokens, p.name),
    )
    sooner = _sooner_at_decode(rules, need, first, chosen, exposed_transfer_s)
    if sooner:
        return _local(chosen, sooner)
    return Placement(
        first.name,
        chosen.name,
        f"{_reading(first)}; {load_of(chosen)}",
        first.incarnation,
        chosen.incarnation,
    )


def _at_decode(
    need: Need, decode: Sequence[DecodeLoad], why: str, *, is_fallback: bool = False
) -> Placement | Rejected:
    free = [d for d in decode if d.has_room(need)]
    if not free:
        return _full(need, decode)
    return _local(emptiest(need, free), why, is_fallback=is_fallback)


def _local(chosen: DecodeLoad, why: str, *, is_fallback: bool = False) -> Placement:
    why = f"{load_of(chosen)}; {why}"
    incarnation = chosen.incarnation
    return Placement(
        None, chosen.name, why, decode_incarnation=incarnation, is_fallback=is_fallback
    )


def _full(need: Need, decode: Sequence[DecodeLoad]) -> Rejected:
    if any(d.has_room(need) for d in decode):
        return Rejected("every prefill worker has enough prompts to read", Reason.FULL)
    return Rejected(f"no decode slot or no {need.num_tokens} tokens of KV are free", Reason.FULL)


def emptiest(need: Need, workers: Sequence[DecodeLoad]) -> DecodeLoad:
    """The one with most of the prompt cached among those that are almost as empty as any.

    Less than half of a prompt, say a system prompt's head that all share, draws nobody anywhere.
    """
    fewest = min(worker.num_sequences for worker in workers)
    near = [worker for worker in workers if worker.num_sequences - fewest <= worker.near]

    def worth(worker: DecodeLoad) -> int:
        is_most = 2 * worker.num_cached_tokens >= need.num_prompt_tokens
        return worker.num_cached_tokens if is_most else 0

    return min(
        near,
        key=lambda w: (
            -worth(w),
            not w.is_of_session,
            w.num_sequences,
            w.num_prompt_tokens,
            w.name,
        ),
    )


def _wait(worker: PrefillLoad, need: Need) -> float:
    """Seconds until the prompt is read; tokens where no rate is known, which then none has."""
    num_tokens = worker.num_prompt_tokens + need.num_prompt_tokens - worker.num_cached_tokens
    return num_tokens / (worker.tokens_per_s or 1.0)


def _sooner_at_decode(
    rules: Rules,
    need: Need,
    reader: PrefillLoad,
    worker: DecodeLoad,
    exposed_transfer_s: float | None,
) -> str:
    """Why the decode worker should read a short prompt itself; empty when it should not.

    Its running sequences all wait while it reads, so each of them counts that time once more.
    """
    num_tokens = need.num_prompt_tokens - worker.num_cached_tokens
    if num_tokens > rules.max_local_tokens or exposed_transfer_s is None:
        return ""
    if worker.tokens_per_s is None or reader.tokens_per_s is None:
        return ""
    own_s = num_tokens / worker.tokens_per_s
    local_s = worker.num_prompt_tokens / worker.tokens_per_s + own_s * (1 + worker.num_sequences)
    remote_s = _wait(reader, need) + exposed_transfer_s
    if local_s >= remote_s:
        return ""
    return (
        f"reading {num_tokens} tokens there costs {local_s:.3f} s, streams that wait included, "
        f"against {remote_s:.3f} s by way of {reader.name}"
    )


def _reading(worker: PrefillLoad) -> str:
    cached = f", {worker.num_cached_tokens} of this prompt cached" * (worker.num_cached_tokens > 0)
    return f"{worker.name} has {worker.num_prompt_tokens} prompt tokens to read{cached}"


def load_of(worker: DecodeLoad) -> str:
    """What speaks for a decode worker, in words."""
    cached = f", {worker.num_cached_tokens} tokens cached" * (worker.num_cached_tokens > 0)
    session = ", served this session" * worker.is_of_session
    sequences = f"{worker.num_sequences} of {worker.max_num_sequences} sequences"
    return f"{worker.name} has {sequences}{cached}{session}"
