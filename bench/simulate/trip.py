"""One request's way through the simulated cluster, and when it was where."""

from dataclasses import dataclass

from bench.simulate.trace import Arrival, TraceBlocks
from core.request import RequestId
from router.placing.fairness import Ticket
from router.placing.knowledge import Lease
from router.placing.placement import Need


@dataclass(eq=False, slots=True)
class Trip:
    """Times are None until then; why it failed is empty unless it did.

    alone_s is what reading the prompt takes where nothing else is done.
    """

    request_id: RequestId
    arrival: Arrival
    need: Need
    prompt: TraceBlocks
    ticket: Ticket
    alone_s: float
    lease: Lease | None = None
    placed_s: float | None = None
    first_step_s: float | None = None
    first_token_s: float | None = None
    sealed_s: float | None = None
    first_decode_s: float | None = None
    ended_s: float | None = None
    failure: str = ""
    num_unread_tokens: int = 0
    num_left_tokens: int = 0
    compute_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None for an answer of one token."""
        if self.ended_s is None or self.first_token_s is None:
            return None
        num_gaps = self.arrival.num_output_tokens - 1
        return (self.ended_s - self.first_token_s) / num_gaps if num_gaps else None
