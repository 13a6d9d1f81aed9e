"""Where requests wait for workers.

1 a request whose deadline is lost by measured rates is refused; every other one gets a ticket
2 whenever work ends or the fleet changes, tickets are tried in fair order; one that fits nowhere
  may be passed by others for a while, then by nobody
3 its lease counts as load from the decision on, until the context of `placed` ends

The decisions are in `placement`, `fairness` and `admission`, their facts in `knowledge`. Runs in
the router's event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.clock import Clock
from core.config import Mode
from core.errors import InvalidRequest, Overloaded, PeerLost, TwophaseError
from core.signals import Demand
from core.worker import Role
from router.answer import Answer
from router.members.fleet import Fleet
from router.placing.admission import UNKNOWN_WAIT_S, Backlog, refuse_if_late
from router.placing.fairness import FairQueue, Ticket
from router.placing.holder import beside
from router.placing.knowledge import Asked, Knowledge, Lease
from router.placing.load import DecodeLoad, Loads, Need, PrefillLoad
from router.placing.migration import move
from router.placing.placement import Placement, Reason, Rejected, Rules, place
from router.placing.prefix_index import PromptBlocks
from router.placing.recovery import Recovery
from router.policy import DispatchPolicy


@dataclass(eq=False, slots=True)
class _Waiting:
    """One attempt that wants workers; `turn` is set when `lease`, `error` or `until_s` changed."""

    answer: Answer
    recovery: Recovery
    need: Need
    prompt: PromptBlocks
    ticket: Ticket
    until_s: float
    why: Rejected | None = None
    lease: Lease | None = None
    error: TwophaseError | None = None
    turn: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session(self) -> str:
        """The session that the request belongs to; empty for none."""
        return self.answer.request.sender.session


class Placing:
    """The line, and all leases.

    Invariants: a ticket leaves the line once, with a lease or with an error; a lease ends once.
    """

    def __init__(self, fleet: Fleet, policy: DispatchPolicy, clock: Clock) -> None:
        self.knowledge = Knowledge(clock.now_s())
        self._fleet = fleet
        self._policy = policy
        self._clock = clock
        self._line = FairQueue()
        self._waiting: dict[Ticket, _Waiting] = {}
        self._is_falling_back = False
        self._log = logging.getLogger("twophase.router")

    def obey(self, policy: DispatchPolicy) -> None:
        """Place by this policy from now on; who is in line keeps the time that it may wait."""
        self._policy = policy
        self._pump()

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def demand(self) -> Demand:
        """What is asked for, and who waits."""
        is_idle = self.knowledge.ledger.is_empty
        return self.knowledge.demand.snapshot(self._line, self._clock.now_s(), is_idle=is_idle)

    async def watch(self) -> None:
        """Try those in line again whenever the fleet changes; never returns."""
        while True:
            changed = self._fleet.changed
            members = self._fleet.members(Role.PREFILL) + self._fleet.members(Role.DECODE)
            self.knowledge.keep({member.info.incarnation for member in members})
            self._pump()
            await changed.wait()

    @asynccontextmanager
    async def placed(
        self, answer: Answer, recovery: Recovery, placement: Placement | None
    ) -> AsyncIterator[Lease]:
        """Workers for the next attempt at `answer`, which are its own while the context lasts.

        A given `placement` is taken as it is, at once.

        Raises:
            Overloaded: the line is full, the request was in it for too long, or its deadline is
                lost; with the predicted wait.
            PeerLost: no worker can serve it, nor came in time; the last error if all were tried.
            InvalidRequest: it is too large for every worker.
        """
        if placement is not None:
            yield Lease(placement)
            return
        lease = await self._turn(answer, recovery)
        try:
            yield lease
        finally:
            self._end(answer, lease)

    async def _turn(self, answer: Answer, recovery: Recovery) -> Lease:
        waiting = self._enter(answer, recovery)
        try:
            while waiting.lease is None:
                if waiting.error is not None:
                    raise waiting.error
                try:
                    async with asyncio.timeout(waiting.until_s - self._clock.now_s()):
                        await waiting.turn.wait()
                    waiting.turn.clear()
                except TimeoutError:
                    waiting.error = waiting.error or self._late(waiting)
        except BaseException:
            if waiting.lease is not None:  # granted and cancelled in one turn of the loop
                self._end(answer, waiting.lease)
            raise
        finally:
            if self._waiting.pop(waiting.ticket, None) is not None:
                self._line.withdraw(waiting.ticket)
                self._pump()
        return waiting.lease

    def _enter(self, answer: Answer, recovery: Recovery) -> _Waiting:
        """A ticket in line, or a lease already if there is room."""
        request, now_s = answer.request, self._clock.now_s()
        prompt = PromptBlocks((*request.prompt_token_ids, *answer.log))
        need = Need(prompt.num_tokens, request.max_num_tokens)
        sender = request.sender
        is_begun = recovery.last_error is not None or answer.index > 0
        # What its client has of it from another router must not be in vain; its turn is that of a
        # new one, for whoever asks could say so.
        may_be_refused = not (is_begun or (request.resumption and request.resumption.token_ids))
        if recovery.last_error is None:
            self.knowledge.demand.arrived(now_s)
        if may_be_refused and self.knowledge.rates.is_steady:
            backlog = self._backlog(answer, need)
            refuse_if_late(backlog, deadline_s=request.deadline_s, now_s=now_s)
        ticket = Ticket(
            client=sender.client,
            priority=sender.priority,
            is_begun=is_begun,
            num_prompt_tokens=need.num_prompt_tokens,
            num_tokens=need.num_tokens,
            arrived_s=now_s,
        )
        until_s = now_s + self._policy.max_queue_s
        waiting = _Waiting(answer, recovery, need, prompt, ticket, until_s)
        is_full = len(self._line) >= self._policy.max_queued_requests
        self._line.push(ticket)
        self._waiting[ticket] = waiting
        self._pump()
        if is_full and ticket in self._waiting and may_be_refused:
            waiting.error = Overloaded(
                f"{self._policy.max_queued_requests} requests wait in line",
                retry_after_s=self._hint_s(waiting),
            )
        return waiting

    def _pump(self) -> None:
        """Place whom there is room for, in fair order."""
        self._line.try_in_order(
            lambda ticket: self._try(self._waiting[ticket]), self._clock.now_s()
        )

    def _try(self, waiting: _Waiting) -> bool:
        """Whether the ticket has left the line, with a lease or an error."""
        holder = waiting.answer.prompt_holder if waiting.answer.index > 0 else ""
        placement, loads = self.knowledge.place(
            lambda loads: self._place(waiting, loads),
            waiting.recovery.may_use(self._loads()),
            Asked(waiting.prompt, waiting.session, holder),
        )
        if isinstance(placement, Rejected):
            waiting.error = self._error(waiting, placement)
            if waiting.error is None:
                return False
            self._line.withdraw(waiting.ticket)
        else:
            waiting.lease = self.knowledge.begin(
                placement, waiting.need, waiting.prompt, loads, waiting.session
            )
            # The other answers, and those whose KV cache is fetched, tell nothing of prefill.
            if waiting.answer.index == 0 and placement.held_id is None:
                self._note_fallback(is_on=placement.is_fallback)
            self._line.serve(waiting.ticket)
        del self._waiting[waiting.ticket]
        waiting.turn.set()
        return True

    def _place(self, waiting: _Waiting, loads: Loads) -> Placement | Rejected:
        origin = waiting.recovery.origin
        if origin is not None and self._is_connected(origin.incarnation):
            moved = move(origin, waiting.need, loads.decode)
            if moved is not None:
                return moved
        at_holder = None
        if waiting.answer.index > 0:
            at_holder = beside(waiting.answer.prompt_holder, waiting.need, loads.decode)
            if isinstance(at_holder, Placement):
                return at_holder
        elsewhere = place(
            self._rules(waiting.recovery),
            waiting.need,
            loads.prefill,
            loads.decode,
            exposed_transfer_s=self.knowledge.rates.exposed_transfer_s(),
        )
        return at_holder if at_holder and isinstance(elsewhere, Rejected) else elsewhere

    def _is_connected(self, incarnation: str) -> bool:
        """Whether that decode worker still is: another of its name holds nothing of it."""
        return any(m.info.incarnation == incarnation for m in self._fleet.members(Role.DECODE))

    def _error(self, waiting: _Waiting, rejected: Rejected) -> TwophaseError | None:
        """What a rejection means for the request; None lets it wait."""
        had = waiting.why
        waiting.why = rejected
        if rejected.reason is Reason.FULL:
            if had is not None and had.reason is not Reason.FULL:
                self._let_wait(waiting, self._policy.max_queue_s)
            return None
        recovery = waiting.recovery
        # A worker that was lost is started again: others that were tried do not stand for it.
        is_lost = isinstance(recovery.last_error, PeerLost) or self._fleet.is_incomplete
        is_hopeful = recovery.last_error is not None and is_lost and recovery.may_recompute
        is_anybody_there = bool(self._fleet.decode_loads()) and not is_hopeful
        if is_anybody_there and recovery.last_error is not None:
            return recovery.last_error  # all that are there were tried
        if rejected.reason is Reason.TOO_LARGE and self._is_too_large(waiting):
            return InvalidRequest(
                "max_tokens", waiting.answer.request.sampling.max_tokens, rejected.why
            )
        if is_anybody_there or not recovery.may_recompute:
            return PeerLost("cluster", rejected.why)
        if had is None or had.reason is Reason.FULL:
            self._let_wait(waiting, self._policy.max_wait_s)
        return None

    def _let_wait(self, waiting: _Waiting, seconds: float) -> None:
        waiting.until_s = self._clock.now_s() + seconds
        waiting.turn.set()

    def _is_too_large(self, waiting: _Waiting) -> bool:
        """Whether even with all workers that are connected in use it would not fit."""
        prefill = [PrefillLoad.of(m.info, 0) for m in self._fleet.members(Role.PREFILL)]
        decode = [DecodeLoad.of(m.info, 0) for m in self._fleet.members(Role.DECODE)]
        outcome = place(self._rules(waiting.recovery), waiting.need, prefill, decode)
        return isinstance(outcome, Rejected) and outcome.reason is Reason.TOO_LARGE

    def _late(self, waiting: _Waiting) -> TwophaseError:
        """Why a request that was in line for as long as may be is given up."""
        assert waiting.why is not None
        if waiting.why.reason is Reason.FULL:
            return Overloaded(
                f"no room within {self._policy.max_queue_s:g} s: {waiting.why.why}",
                retry_after_s=self._hint_s(waiting),
            )
        lost = PeerLost("cluster", waiting.why.why)
        lost.__cause__ = waiting.recovery.last_error
        return lost

    def _end(self, answer: Answer, lease: Lease) -> None:
        self.knowledge.end(lease, answer.request, answer.log)
        self._pump()

    def _hint_s(self, waiting: _Waiting) -> float:
        """When to try again."""
        return self._backlog(waiting.answer, waiting.need).wait_s or UNKNOWN_WAIT_S

    def _backlog(self, answer: Answer, need: Need) -> Backlog:
        sender = answer.request.sender
        ahead = self._line.ahead_of(sender.client, sender.priority)
        return self.knowledge.backlog(self._loads(), ahead, need)

    def _loads(self) -> Loads:
        return Loads(self._fleet.prefill_loads(), self._fleet.decode_loads())

    def _rules(self, recovery: Recovery) -> Rules:
        return Rules(
            self._policy.mode,
            may_convert_dtype=self._policy.may_convert_dtype,
            may_recompute=recovery.may_recompute,
            max_local_tokens=self._policy.max_local_tokens,
        )

    def _note_fallback(self, *, is_on: bool) -> None:
        """Say once when decode workers begin to read prompts, and once when they need not."""
        if self._policy.mode is not Mode.DISAGGREGATED or is_on == self._is_falling_back:
            return
        self._is_falling_back = is_on
        self._log.warning("decode workers %s", "read prompts" if is_on else "read no prompts now")
