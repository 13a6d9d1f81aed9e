"""Where a request stands, as the router sees it.

    RECEIVED -> ADMITTED -> RESERVING -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED
        |           |           |            |              |             |
        +-----------+-----------+------------+--------------+-------------+-> FAILED

A request whose prompt is read at its decode worker skips TRANSFERRING; an answer that is complete
with its first token goes from there to FINISHED. FAILED is left only for RESERVING, when other
workers are tried; an answer that its client has already goes from RECEIVED to FINISHED. Whatever
the request held is given back on entering FINISHED or FAILED, once.
"""

from dataclasses import dataclass, field
from enum import Enum

from core.errors import InvariantBroken


class RequestState(Enum):
    """Where a request stands; see the module's automaton."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RECEIVED: frozenset(
        {RequestState.ADMITTED, RequestState.FINISHED, RequestState.FAILED}
    ),
    RequestState.ADMITTED: frozenset({RequestState.RESERVING, RequestState.FAILED}),
    RequestState.RESERVING: frozenset({RequestState.PREFILLING, RequestState.FAILED}),
    RequestState.PREFILLING: frozenset(
        {RequestState.TRANSFERRING, RequestState.DECODING, RequestState.FAILED}
    ),
    RequestState.TRANSFERRING: frozenset(
        {RequestState.DECODING, RequestState.FINISHED, RequestState.FAILED}
    ),
    RequestState.DECODING: frozenset({RequestState.FINISHED, RequestState.FAILED}),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset({RequestState.RESERVING}),
}


@dataclass(slots=True)
class Progress:
    """The one mutable place of a request's state: moves only along TRANSITIONS."""

    state: RequestState = RequestState.RECEIVED
    history: list[RequestState] = field(default_factory=lambda: [RequestState.RECEIVED])

    def move(self, state: RequestState) -> None:
        """Enter `state`; an arrow that the automaton lacks is a bug."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantBroken(f"a request cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.history.append(state)
