"""One request in full: its phases one below the other, its longest gap named, what slowed it down.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.completion import Completion
from core.finding import Finding
from core.request import Usage
from core.request_state import RequestState
from core.timeline import Gap, TransferReport
from router.page.span import Span, open_phase, spans_of, spans_so_far


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase: when it began, counted from the request's receipt, and how long it took."""

    phase: str
    begin_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LongGap:
    """A wait between two tokens, and in words what ran in it; index is that of the later token."""

    index: int
    begin_s: float
    seconds: float
    what_ran: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One request that ended, or that is inside: then state is the phase that it is in.

    ttft_s is None before the first token.
    """

    request_id: str
    state: str
    total_s: float
    ttft_s: float | None
    usage: Usage
    prefill_worker: str
    decode_worker: str
    placement: str
    failures: tuple[str, ...]
    transfer: TransferReport | None
    bars: tuple[Bar, ...]
    gaps: tuple[LongGap, ...]
    findings: tuple[Finding, ...]


def waterfall_of(completion: Completion, findings: Sequence[Finding]) -> Waterfall:
    """Of a request that ended."""
    return _waterfall(
        completion, completion.finish_reason, spans_of(completion.phases), tuple(findings)
    )


def waterfall_so_far(known: Completion, state: RequestState) -> Waterfall:
    """Of a request that is inside, as far as is known."""
    return _waterfall(known, open_phase(known, state), spans_so_far(known, state), ())


def _waterfall(
    completion: Completion, state: str, spans: Sequence[Span], findings: tuple[Finding, ...]
) -> Waterfall:
    bars = bars_of(spans)
    return Waterfall(
        request_id=completion.request_id,
        state=state,
        total_s=completion.phases.total_s,
        ttft_s=completion.phases.time_to_first_token_s or None,
        usage=completion.usage,
        prefill_worker=completion.prefill_worker,
        decode_worker=completion.decode_worker,
        placement=completion.placement,
        failures=completion.failures,
        transfer=completion.transfer,
        bars=bars,
        gaps=_gaps(completion, bars),
        findings=findings,
    )


def bars_of(spans: Sequence[Span]) -> tuple[Bar, ...]:
    """Each span begins where the one before it ends."""
    bars, begin_s = [], 0.0
    for phase, seconds in spans:
        bars.append(Bar(phase, begin_s, seconds))
        begin_s += seconds
    return tuple(bars)


def _gaps(completion: Completion, bars: Sequence[Bar]) -> tuple[LongGap, ...]:
    gap = completion.decode.longest_gap if completion.decode is not None else None
    decode = next((bar for bar in bars if bar.phase == "decode"), None)
    if gap is None or decode is None:
        return ()
    # Decode tells of the longest gap alone: the others are taken to be equally long.
    num_others = max(completion.usage.num_output_tokens - 2, 1)
    other_s = max(decode.seconds - gap.gap_s, 0.0) / num_others
    offset_s = min((gap.index - 1) * other_s, max(decode.seconds - gap.gap_s, 0.0))
    begin_s = decode.begin_s + max(offset_s, 0.0)
    return (LongGap(gap.index, begin_s, gap.gap_s, what_ran(gap)),)


def what_ran(gap: Gap) -> str:
    """What kept the next token waiting, in words."""
    if gap.num_prompt_tokens:
        names = f" of {', '.join(gap.prompts)}" if gap.prompts else ""
        return f"{gap.num_prompt_tokens} prompt tokens{names} were read"
    if gap.step_s >= gap.gap_s / 2:
        return f"one decode step of {gap.num_sequences} sequences took {gap.step_s:.3f} s"
    return f"the worker's steps took {gap.step_s:.3f} s of it; else it stood still"
