"""Where the time of one request went, as spans: one after another, adding up to the whole.

Phases are durations, measured where they happened; drawn in the order in which they happen, each
begins where the one before it ends. Of a request that still runs, what no report has told yet is
the phase that it is in.

Pure.
"""

from collections.abc import Iterable

from core.completion import Completion
from core.request_state import RequestState
from core.timeline import Phases

# Name and seconds of a phase.
Span = tuple[str, float]

UNACCOUNTED = "unaccounted"
# Which of the two a prompt was in, its worker tells with the first token.
PREFILLING = "queue_or_prefill"
_OPEN = {
    RequestState.RECEIVED: "tokenize",
    RequestState.ADMITTED: "place",
    RequestState.RESERVING: "reserve",
    RequestState.PREFILLING: PREFILLING,
    RequestState.TRANSFERRING: "exposed_transfer",
    RequestState.DECODING: "decode",
    RequestState.FINISHED: "delivery",
    RequestState.FAILED: "recovery",
}
_BEFORE = ("tokenize", "place", "recovery", "reserve")
_AFTER = ("queue", "prefill", "exposed_transfer", "slot_wait", "decode", "delivery")
_ORDER = (*_BEFORE, PREFILLING, *_AFTER)


def spans_of(phases: Phases) -> tuple[Span, ...]:
    """What took any time, in order; what no phase covers comes last."""
    return _told([*phases.items(), (UNACCOUNTED, phases.unaccounted_s)])


def open_phase(known: Completion | None, state: RequestState) -> str:
    """The phase that a request is in; None is known of one whose prompt is read."""
    if state is RequestState.RECEIVED and known is not None:
        return "place"
    if state is RequestState.TRANSFERRING and known is not None and known.transfer is not None:
        return "slot_wait"
    return _OPEN[state]


def spans_so_far(known: Completion, state: RequestState) -> tuple[Span, ...]:
    """Of a request in `state`: what its phases tell, and the rest as the phase that it is in."""
    taken = dict(known.phases.items())
    rest = open_phase(known, state)
    taken[rest] = taken.get(rest, 0.0) + max(known.phases.unaccounted_s, 0.0)
    return _told([(name, taken[name]) for name in _ORDER if name in taken])


def _told(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple((name, round(seconds, 6)) for name, seconds in spans if seconds > 0)
