"""Where the time of one request went, as spans: one after another, adding up to the whole.

Phases are durations, measured where they happened; drawn in the order in which they happen, each
begins where the one before it ends. Of a request that still runs, what no report has told yet is
the phase that it is in.

Pure.
"""

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


def spans_of(phases: Phases) -> tuple[Span, ...]:
    """What took any time, in order; what no phase covers comes last."""
    return _told([*phases.items(), (UNACCOUNTED, phases.unaccounted_s)])


def spans_so_far(phases: Phases, state: RequestState) -> tuple[Span, ...]:
    """Of a request in `state`: what its phases tell, and the rest as the phase that it is in."""
    open_phase = _OPEN[state]
    taken = dict(phases.items())
    taken[open_phase] = taken.get(open_phase, 0.0) + max(phases.unaccounted_s, 0.0)
    order = [*dict(phases.items()), PREFILLING]
    return _told([(name, taken[name]) for name in order if name in taken])


def _told(spans: list[Span]) -> tuple[Span, ...]:
    return tuple((name, seconds) for name, seconds in spans if seconds > 0)
