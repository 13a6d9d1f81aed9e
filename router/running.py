"""The requests that are inside, a bounded number: whom operators list, and whom `Cancel` ends.

A request is inside from the moment its message was unpacked until its last one was written, also
while it waits for workers. Cancelling it cancels the task that serves it, as if its client had
gone away, but the client is told.

Runs in the router's event loop. Knows no protocol.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from core.clock import Clock
from core.completion import Completion
from core.errors import Cancelled, DuplicateRequest, Overloaded, TwophaseError
from core.request import RequestId
from core.request_state import RequestState
from router.answer import Answer
from router.keys import caller


class RunningRequest:
    """One request inside; `answers` is filled as they are dispatched.

    caller is the API key that it came with; empty where none is asked for.
    """

    def __init__(self, request_id: RequestId, received_s: float, caller: str) -> None:
        self.request_id = request_id
        self.received_s = received_s
        self.caller = caller
        self.answers: list[Answer] = []
        self.is_cancelled = False
        self._task = asyncio.current_task()

    @property
    def state(self) -> RequestState:
        """Where it stands."""
        return RequestState.RECEIVED if self.answer is None else self.answer.state

    @property
    def answer(self) -> Answer | None:
        """Its first answer that is not finished, else the last; None while there is none."""
        unfinished = (a for a in self.answers if a.state is not RequestState.FINISHED)
        return next(unfinished, self.answers[-1] if self.answers else None)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its answers so far."""
        return sum(len(answer.log) for answer in self.answers)

    def known(self, now_s: float) -> Completion | None:
        """What is known of answers that will not be complete; None before they were dispatched.

        Tokens are those of all answers, the rest is of the first that is not finished.
        """
        if self.answer is None:
            return None
        known = self.answer.known(now_s)
        others = sum(a.num_delivered_tokens for a in self.answers if a is not self.answer)
        num_output_tokens = known.usage.num_output_tokens + others
        return replace(known, usage=replace(known.usage, num_output_tokens=num_output_tokens))

    def cancel(self) -> None:
        """Have the task that serves it raise Cancelled."""
        assert self._task is not None
        self.is_cancelled = True
        self._task.cancel()

    def is_end(self) -> bool:
        """Whether the CancelledError that leaves the task is of `cancel` alone: then it is taken.

        Contract: called once, by the task itself.
        """
        assert self._task is not None
        return self.is_cancelled and self._task.uncancel() == 0


class RunningRequests:
    """All of them.

    Invariants: an id is inside at most once, and leaves exactly once; those inside have asked for
    at most max_answers answers together.
    """

    def __init__(self, max_answers: int, clock: Clock) -> None:
        self._max_answers = max_answers
        self._clock = clock
        self._by_id: dict[RequestId, RunningRequest] = {}
        self._num_answers = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @contextmanager
    def entered(
        self, request_id: RequestId, received_s: float, num_answers: int = 1
    ) -> Iterator[RunningRequest]:
        """The request is inside while the context lasts, which the current task serves.

        It counts as num_answers.

        An error that leaves the context takes along what was known of the answer.

        Raises:
            DuplicateRequest: a request with this id is inside.
            Overloaded: as many answers are inside as may be.
            Cancelled: `cancel` was called.
        """
        if request_id in self._by_id:
            raise DuplicateRequest(request_id)
        if self._num_answers + num_answers > self._max_answers:
            raise Overloaded(f"{self._num_answers} of {self._max_answers} answers are active")
        running = RunningRequest(request_id, received_s, caller.get())
        self._by_id[request_id] = running
        self._num_answers += num_answers
        self._is_empty.clear()
        try:
            yield running
        except asyncio.CancelledError:
            if not running.is_end():
                raise
            error = Cancelled(f"request {request_id} was cancelled by its id")
            error.completion = running.known(self._clock.now_s())
            raise error from None
        except TwophaseError as error:
            # Workers may have failed several requests with this one error: set for each anew.
            error.completion = running.known(self._clock.now_s())
            raise
        finally:
            del self._by_id[request_id]
            self._num_answers -= num_answers
            if not self._by_id:
                self._is_empty.set()

    async def emptied(self) -> None:
        """Return once nobody is inside."""
        await self._is_empty.wait()

    def cancel(self, request_id: RequestId) -> bool:
        """End a request of this task's caller; idempotent.

        False if it is not inside, was cancelled before, or came with another API key: who does not
        own a request is not told that it exists.
        """
        running = self._by_id.get(request_id)
        if running is None or running.is_cancelled or running.caller != caller.get():
            return False
        running.cancel()
        return True

    @property
    def num_requests(self) -> int:
        """How many are inside."""
        return len(self._by_id)

    @property
    def num_answers(self) -> int:
        """How many answers they have asked for."""
        return self._num_answers

    def find(self, request_id: RequestId) -> RunningRequest | None:
        """The request of that id; None if it is not inside."""
        return self._by_id.get(request_id)

    def is_inside(self, request_id: RequestId) -> bool:
        """Whether the request is."""
        return request_id in self._by_id

    def oldest_first(self) -> list[RunningRequest]:
        """Everybody inside."""
        return list(self._by_id.values())
