"""In which order requests that wait at the router get their turn.

A higher priority goes first. Within one, clients share by weight of tokens, not by number of
requests: start-time fair queueing (Goyal et al., SIGCOMM'96), with the tokens that a request may
take as its cost. A client with a hundred prompts waiting does not delay another's one by more
than the one that is next.

Pure: knows no workers and reads no clock.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from core.request import Priority

MAX_REMEMBERED_CLIENTS = 4096
# A request that fits nowhere may be passed by others for this long, then by nobody.
MAX_PASSED_S = 2.0
# So many that fit nowhere are tried at a time: the others wait for the same room.
MAX_MISFITS = 8


@dataclass(eq=False, slots=True)
class Ticket:
    """One request that waits.

    is_begun: its request was served before: workers failed its answer on the way, or it is one more
    answer to the same prompt. It goes before all that are new.
    num_prompt_tokens have to be read for it; num_tokens, prompt and answer at their longest, are
    its cost. tried_s is when it was first tried in vain.
    """

    client: str
    priority: Priority
    is_begun: bool
    num_prompt_tokens: int
    num_tokens: int
    arrived_s: float
    tried_s: float | None = None
    start: float = field(default=0.0, init=False)
    number: int = field(default=0, init=False)

    @property
    def place_in_line(self) -> tuple[bool, Priority, float, int]:
        """Sorts tickets; the lowest is next."""
        return (not self.is_begun, self.priority, self.start, self.number)


class FairQueue:
    """Tickets in line.

    Invariants: the line is sorted; a ticket is in it from `push` to the one call of `serve` or
    `withdraw`; what is remembered of clients is forgotten when nobody waits.
    """

    def __init__(self) -> None:
        self._line: list[Ticket] = []
        self._finish: dict[str, float] = {}
        self._now = 0.0  # virtual time: the start of the ticket that was served last
        self._num_pushed = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def __iter__(self) -> Iterator[Ticket]:
        """Those that wait, next one first; a copy, so tickets may leave meanwhile."""
        return iter(tuple(self._line))

    def push(self, ticket: Ticket) -> None:
        """Let `ticket` wait for its turn."""
        ticket.start = self._start_of(ticket.client)
        self._num_pushed += 1
        ticket.number = self._num_pushed
        self._finish[ticket.client] = ticket.start + ticket.num_tokens
        bisect.insort(self._line, ticket, key=lambda other: other.place_in_line)

    def serve(self, ticket: Ticket) -> None:
        """`ticket` got what it waited for; called once."""
        self._line.remove(ticket)
        self._now = max(self._now, ticket.start)
        self._forget()

    def withdraw(self, ticket: Ticket) -> None:
        """`ticket` waits no more, and its client is not charged for it; called once."""
        self._line.remove(ticket)
        if ticket.client in self._finish:
            self._finish[ticket.client] -= ticket.num_tokens
        self._forget()

    def try_in_order(self, serves: Callable[[Ticket], bool], now_s: float) -> None:
        """Give each its turn, next one first, until those that fit nowhere hold up the rest.

        Args:
            serves: tells whether a ticket has left the line, which it does itself.
            now_s: the time.
        """
        num_misfits = 0
        for ticket in self:
            if serves(ticket):
                continue
            num_misfits += 1
            if ticket.tried_s is None:
                ticket.tried_s = now_s
            if num_misfits == MAX_MISFITS or now_s - ticket.tried_s > MAX_PASSED_S:
                return

    def ahead_of(self, client: str, priority: Priority) -> Sequence[Ticket]:
        """Those that would be served before a new request of `client`."""
        place = (True, priority, self._start_of(client), self._num_pushed + 1)
        return [ticket for ticket in self._line if ticket.place_in_line < place]

    def _start_of(self, client: str) -> float:
        return max(self._now, self._finish.get(client, 0.0))

    def _forget(self) -> None:
        if not self._line:
            self._finish.clear()
            self._now = 0.0
        elif len(self._finish) > MAX_REMEMBERED_CLIENTS:
            waiting = {ticket.client for ticket in self._line}
            self._finish = {
                client: finish
                for client, finish in self._finish.items()
                if finish > self._now or client in waiting
            }
