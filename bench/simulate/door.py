"""The router's part: admission, the fair line, placement, and what is known of the workers.

As `router.placing.line`, without its event loop: tickets are tried when a request comes, when one
ends, and when the workers change.
"""

from collections.abc import Callable, Collection

from bench.simulate.agenda import Agenda
from bench.simulate.trip import Trip
from core.errors import Overloaded
from core.request import FinishReason, Request, RequestId, SamplingParams
from core.signals import Demand
from core.timeline import DecodeReport, PrefillReport, TransferReport
from core.worker import DecodeDone, FirstToken, NewToken, WorkerInfo
from router.placing.admission import refuse_if_late
from router.placing.fairness import FairQueue, Ticket
from router.placing.knowledge import Asked, Knowledge
from router.placing.load import DecodeLoad, Loads, PrefillLoad
from router.placing.placement import Placement, Reason, Rules, place
from router.policy import DispatchPolicy

# Nobody reads it: an answer without tokens teaches the prefix index nothing.
NO_ANSWER = Request(RequestId("simulated"), (0,), SamplingParams(), 0.0)


class Door:
    """Requests in line, and leases.

    Invariant: a trip leaves the line once: placed, or given up.
    """

    def __init__(
        self,
        policy: DispatchPolicy,
        agenda: Agenda,
        *,
        deadline_s: float,
        placed: Callable[[Trip, Placement], None],
        given_up: Callable[[Trip, str], None],
    ) -> None:
        self._policy = policy
        self._rules = Rules(policy.mode, max_local_tokens=0)
        self._agenda = agenda
        self._deadline_s = deadline_s
        self._placed = placed
        self._given_up = given_up
        self._knowledge = Knowledge(agenda.now_s)
        self._line = FairQueue()
        self._waiting: dict[Ticket, Trip] = {}
        self._loads = Loads([], [])

    @property
    def demand(self) -> Demand:
        """What a router would tell those who scale pools."""
        is_idle = self._knowledge.ledger.is_empty
        return self._knowledge.demand.snapshot(self._line, self._agenda.now_s, is_idle=is_idle)

    def workers_are(
        self,
        prefill: Collection[WorkerInfo],
        decode: Collection[WorkerInfo],
        living: Collection[str],
    ) -> None:
        """Only these are given requests from now on; `living` are all incarnations there are."""
        self._loads = Loads(
            [PrefillLoad.of(info, 0) for info in prefill],
            [DecodeLoad.of(info, 0) for info in decode],
        )
        self._knowledge.keep(living)
        self._pump()

    def enter(self, trip: Trip) -> None:
        """A request comes: it is refused, waits, or is placed at once. One that is begun waits."""
        knowledge, now_s = self._knowledge, self._agenda.now_s
        is_new = not trip.ticket.is_begun
        if is_new:
            knowledge.demand.arrived(now_s)
        if is_new and knowledge.rates.is_steady:
            ahead = self._line.ahead_of(trip.ticket.client, trip.ticket.priority)
            try:
                backlog = knowledge.backlog(self._loads, ahead, trip.need)
                refuse_if_late(backlog, deadline_s=now_s + self._deadline_s, now_s=now_s)
            except Overloaded as error:
                return self._given_up(trip, str(error))
        if is_new and len(self._line) >= self._policy.max_queued_requests:
            return self._given_up(trip, "the line is full")
        self._line.push(trip.ticket)
        self._waiting[trip.ticket] = trip
        self._agenda.at(now_s + self._policy.max_queue_s, lambda: self._late(trip))
        self._pump()

    def read(self, trip: Trip) -> None:
        """A prompt is read, and the first token there."""
        assert trip.lease is not None and trip.lease.work is not None
        queue_s = self._agenda.now_s - (trip.placed_s or 0.0) - trip.compute_s
        num_cached = trip.lease.num_prompt_tokens - trip.lease.work.num_prompt_tokens
        report = PrefillReport(max(queue_s, 0.0), trip.compute_s, num_cached, 1)
        self._knowledge.hear(trip.lease, FirstToken(0, report), self._agenda.now_s)

    def sealed(self, trip: Trip) -> None:
        """Its KV cache is at decode."""
        assert trip.lease is not None and trip.lease.work is not None
        now_s, read_s = self._agenda.now_s, trip.first_token_s or 0.0
        push_s = now_s - (trip.first_step_s or read_s)
        num_bytes = trip.lease.work.num_bytes
        report = TransferReport("model", num_bytes, 1, push_s, now_s - read_s)
        self._knowledge.hear(trip.lease, report, now_s)

    def failed(self, trip: Trip) -> None:
        """A worker failed this attempt; another one may follow."""
        assert trip.lease is not None
        self._knowledge.end(trip.lease, NO_ANSWER, ())

    def done(self, trip: Trip) -> None:
        """Its answer is complete."""
        assert trip.lease is not None
        now_s = self._agenda.now_s
        if trip.first_decode_s is not None and trip.sealed_s is not None:
            slot_wait_s = trip.first_decode_s - trip.sealed_s
            report = DecodeReport(slot_wait_s, now_s - trip.first_decode_s)
            last = NewToken(trip.request_id, 0, 0, DecodeDone(FinishReason.LENGTH, report))
            self._knowledge.hear(trip.lease, last, now_s)
        self._knowledge.end(trip.lease, NO_ANSWER, ())
        self._pump()

    def _late(self, trip: Trip) -> None:
        if self._waiting.pop(trip.ticket, None) is not None:
            self._line.withdraw(trip.ticket)
            self._given_up(trip, f"no room within {self._policy.max_queue_s:g} s")
            self._pump()

    def _pump(self) -> None:
        self._line.try_in_order(lambda ticket: self._try(self._waiting[ticket]), self._agenda.now_s)

    def _try(self, trip: Trip) -> bool:
        knowledge = self._knowledge
        outcome, loads = knowledge.place(
            lambda loads: place(self._rules, trip.need, loads.prefill, loads.decode),
            trip.recovery.may_use(self._loads),
            Asked(trip.prompt),
        )
        if isinstance(outcome, Placement):
            trip.lease = knowledge.begin(outcome, trip.need, trip.prompt, loads, "")
            trip.placed_s = self._agenda.now_s
            self._line.serve(trip.ticket)
            del self._waiting[trip.ticket]
            self._placed(trip, outcome)
            return True
        if outcome.reason is not Reason.TOO_LARGE:
            return False
        self._line.withdraw(trip.ticket)
        del self._waiting[trip.ticket]
        self._given_up(trip, outcome.why)
        return True
