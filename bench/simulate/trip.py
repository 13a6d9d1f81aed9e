"""One request's way through the simulated cluster, and when it was where."""

from dataclasses import dataclass, replace

from bench.simulate.trace import Arrival, TraceBlocks
from core.request import Priority, RequestId, WorkerName
from router.placing.fairness import Ticket
from router.placing.knowledge import Lease
from router.placing.load import Need
from router.placing.recovery import Recovery


@dataclass(eq=False, slots=True)
class Trip:
    """One attempt at it. Times are None until then; why it failed is empty unless it did.

    arrival is what is left to do: an attempt after others has what was emitted in its prompt.
    alone_s is what reading the first attempt's prompt takes where nothing else is done, told_s when
    the client got its first token, of num_asked_tokens, from whatever attempt.
    """

    request_id: RequestId
    arrival: Arrival
    need: Need
    prompt: TraceBlocks
    ticket: Ticket
    alone_s: float
    num_asked_tokens: int
    recovery: Recovery
    told_s: float | None = None
    num_attempts: int = 1
    is_over: bool = False
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

    @classmethod
    def of(
        cls, number: int, arrival: Arrival, recovery: Recovery, now_s: float, alone_s: float
    ) -> "Trip":
        """The first attempt at the request that arrives as `number`, now."""
        return cls(
            request_id=RequestId(str(number)),
            arrival=arrival,
            need=_need(arrival),
            prompt=TraceBlocks(arrival),
            ticket=_ticket(arrival, now_s, is_begun=False),
            alone_s=alone_s,
            num_asked_tokens=arrival.num_output_tokens,
            recovery=recovery,
            num_left_tokens=arrival.num_output_tokens - 1,  # the first comes from prefill
        )

    def again(self, now_s: float) -> "Trip":
        """The attempt after this one, which reads what was emitted with the prompt."""
        arrival = replace(
            self.arrival,
            num_prompt_tokens=self.arrival.num_prompt_tokens + self.num_emitted_tokens,
            num_output_tokens=self.arrival.num_output_tokens - self.num_emitted_tokens,
        )
        return Trip(
            request_id=RequestId(f"{self.request_id}+"),
            arrival=arrival,
            need=_need(arrival),
            prompt=TraceBlocks(arrival),
            ticket=_ticket(arrival, now_s, is_begun=True),
            alone_s=self.alone_s,
            num_asked_tokens=self.num_asked_tokens,
            recovery=self.recovery,
            told_s=self.told_s,
            num_attempts=self.num_attempts + 1,
            num_left_tokens=arrival.num_output_tokens - 1,
        )

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens that the client got from this attempt."""
        if self.first_token_s is None:
            return 0
        return self.arrival.num_output_tokens - self.num_left_tokens

    def is_at(self, worker: WorkerName) -> bool:
        """Whether it needs this worker now."""
        if self.is_over or self.lease is None:
            return False
        placement = self.lease.placement
        return placement.decode == worker or (placement.prefill == worker and self.sealed_s is None)

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.told_s is None else self.told_s - self.arrival.at_s

    @property
    def line_s(self) -> float | None:
        """Its wait in line; None where it had to be placed again."""
        if self.num_attempts > 1 or self.placed_s is None:
            return None
        return self.placed_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None for an answer of one token."""
        if self.ended_s is None or self.told_s is None:
            return None
        num_gaps = self.num_asked_tokens - 1
        return (self.ended_s - self.told_s) / num_gaps if num_gaps else None


def _need(arrival: Arrival) -> Need:
    num_tokens = arrival.num_prompt_tokens + arrival.num_output_tokens
    return Need(arrival.num_prompt_tokens, num_tokens)


def _ticket(arrival: Arrival, now_s: float, *, is_begun: bool) -> Ticket:
    need = _need(arrival)
    return Ticket(
        client="trace",
        priority=Priority.NORMAL,
        is_begun=is_begun,
        num_prompt_tokens=need.num_prompt_tokens,
        num_tokens=need.num_tokens,
        arrived_s=now_s,
    )
