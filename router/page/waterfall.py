"""One request in full: its events in rows on one scale, long gaps named, what slowed it down.

A row is a phase (and one more is the pushes of its KV cache, which hide behind prefill): what it
took is the phase, as everywhere; the bars are the events, where they were on the router's clock.
What the events do not tell has no bar.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.completion import Completion
from core.events.event import Event, EventKind
from core.finding import Finding
from core.request import Usage
from core.request_state import RequestState
from core.timeline import TransferReport
from router.page.span import PREFILLING, UNACCOUNTED, open_phase

# The longest of one answer are named.
MAX_GAPS = 6
PUSH = "push"
_ROW_OF = {
    EventKind.TOKENIZE: "tokenize",
    EventKind.LINE: "place",
    EventKind.FAILED: "recovery",
    EventKind.RESERVE: "reserve",
    EventKind.QUEUE: "queue",
    EventKind.CHUNK: "prefill",
    EventKind.PUSH: PUSH,
    EventKind.TRANSFER: "exposed_transfer",
    EventKind.SLOT_WAIT: "slot_wait",
    EventKind.STEPS: "decode",
    EventKind.GAP: "decode",
    EventKind.FIRST_TOKEN: "delivery",
    EventKind.SLOW_DELIVERY: "delivery",
    EventKind.LAST_TOKEN: "delivery",
}
# What is told of all that was delivered so far says nothing of what a running request waits for.
_DELIVERED = (EventKind.DELIVERIES, EventKind.LAST_TOKEN)


@dataclass(frozen=True, slots=True)
class Bar:
    """One event: when it began, counted from the request's receipt, and what it was, in words."""

    begin_s: float
    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Row:
    """One phase; note is empty where there is nothing to say of all its bars together."""

    phase: str
    seconds: float
    bars: tuple[Bar, ...]
    note: str


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

    ttft_s is None before the first token. uncertainty_s: how far off a worker's bars may be.
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
    rows: tuple[Row, ...]
    gaps: tuple[LongGap, ...]
    uncertainty_s: float
    findings: tuple[Finding, ...]


def waterfall_of(
    completion: Completion, events: Sequence[Event], findings: Sequence[Finding]
) -> Waterfall:
    """Of a request that ended; the first of its events is its receipt."""
    return _waterfall(completion, events, completion.finish_reason, tuple(findings), {})


def waterfall_so_far(known: Completion, events: Sequence[Event], state: RequestState) -> Waterfall:
    """Of a request that is inside, as far as is known; the phase that it is in ends now."""
    phase, total_s = open_phase(known, state), known.phases.total_s
    told = [event for event in events if event.kind not in _DELIVERED]
    begin_s = max(event.end_s for event in told) - told[0].begin_s
    bar = Bar(begin_s, max(total_s - begin_s, 0.0), "so far")
    return _waterfall(known, told, phase, (), {phase: bar})


def _waterfall(
    completion: Completion,
    events: Sequence[Event],
    state: str,
    findings: tuple[Finding, ...],
    still: dict[str, Bar],
) -> Waterfall:
    received_s = events[0].begin_s
    gaps = [event for event in events if event.kind is EventKind.GAP]
    longest = sorted(gaps, key=lambda gap: -gap.duration_s)[:MAX_GAPS]
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
        transfer=_without_events(completion.transfer),
        rows=tuple(_rows(completion, events, still)),
        gaps=tuple(
            LongGap(gap.index, gap.begin_s - received_s, gap.duration_s, what_ran(gap))
            for gap in sorted(longest, key=lambda gap: gap.begin_s)
        ),
        uncertainty_s=max(event.uncertainty_s for event in events),
        findings=findings,
    )


def _rows(completion: Completion, events: Sequence[Event], still: dict[str, Bar]) -> list[Row]:
    by_row = _by_row(events)
    transfer, phases = completion.transfer, completion.phases
    taken = dict(phases.items()) | {UNACCOUNTED: phases.unaccounted_s}
    taken |= {PUSH: transfer.push_s if transfer is not None else 0.0, PREFILLING: 0.0}
    order = [*dict(phases.items()), UNACCOUNTED]
    order[order.index("queue") : order.index("queue")] = [PREFILLING]
    order[order.index("exposed_transfer") : order.index("exposed_transfer")] = [PUSH]
    rows = []
    for name in order:
        found = by_row.get(name, [])
        bars = [Bar(e.begin_s - events[0].begin_s, e.duration_s, _what(e)) for e in found]
        seconds = taken[name]
        if name in still:
            bars.append(still[name])
            seconds = max(seconds, still[name].seconds)
        if still and name == UNACCOUNTED:
            continue  # of a running request that is the phase that it is in
        if seconds > 0 or bars:
            rows.append(Row(name, seconds, tuple(bars), _note(name, found)))
    return rows


def _by_row(events: Sequence[Event]) -> dict[str, list[Event]]:
    by_row: dict[str, list[Event]] = {}
    for event in events:
        is_again = event.kind is EventKind.LINE and event.attempt > 1
        name = "recovery" if is_again else _ROW_OF.get(event.kind)
        if name is not None:
            by_row.setdefault(name, []).append(event)
    if "decode" not in by_row:  # the router ended the answer: no report came of its steps
        by_row["decode"] = [event for event in events if event.kind is EventKind.DELIVERIES]
    return by_row


def _without_events(transfer: TransferReport | None) -> TransferReport | None:
    """They are drawn."""
    return None if transfer is None else replace(transfer, events=())


def what_ran(gap: Event) -> str:
    """What kept the next token waiting, in words."""
    if gap.num_tokens:
        names = f" of {', '.join(gap.request_ids)}" if gap.request_ids else ""
        return f"{gap.num_tokens} prompt tokens{names} were read"
    if gap.busy_s >= gap.duration_s / 2:
        return (
            f"one decode step of {_plural(gap.num_sequences, 'sequence')} took {gap.busy_s:.3f} s"
        )
    return f"the worker's steps took {gap.busy_s:.3f} s of it; else it stood still"


def _what(event: Event) -> str:
    match event.kind:
        case EventKind.CHUNK:
            first, last = event.index + 1, event.index + event.count
            chunks = f"chunk {first}" if first == last else f"chunks {first} to {last}"
            return f"{chunks}: {event.num_tokens} tokens on {event.where}"
        case EventKind.PUSH:
            last = event.first_layer + event.num_layers - 1
            return f"layers {event.first_layer} to {last}, {event.num_bytes} bytes"
        case EventKind.STEPS:
            return _steps(event.count, event.num_sequences)
        case EventKind.GAP:
            return what_ran(event)
        case EventKind.FAILED:
            return f"attempt {event.attempt}: {event.note}"
    return event.kind.replace("_", " ")


def _note(name: str, events: Sequence[Event]) -> str:
    count, num_tokens = sum(e.count for e in events), sum(e.num_tokens for e in events)
    match name:
        case "prefill" if events:
            return f"{_plural(count, 'chunk')} with {_plural(num_tokens, 'token')}"
        case "push" if events:
            num_bytes = sum(event.num_bytes for event in events)
            return f"{_plural(count, 'piece')} with {num_bytes / 1e6:.2f} MB"
        case "decode" if any(event.num_sequences for event in events):
            most = max(event.num_sequences for event in events)
            return _steps(count, most)
    return ""


def _steps(count: int, most: int) -> str:
    return f"{_plural(count, 'step')} of at most {_plural(most, 'sequence')}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
