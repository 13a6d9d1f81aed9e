"""The requests that ended lately: what is asked when somebody wants to know why one was slow.

A bounded number, the oldest forgotten first; also requests that failed, as far as they came.

Runs in the router's event loop.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from core.clock import Clock
from core.completion import Completion
from core.diagnosis import explain, usual_of
from core.finding import Finding
from core.request import FinishReason, RequestId
from router.timeline.record import Record


@dataclass(frozen=True, slots=True)
class Ended:
    """One answer, and when it ended by the router's clock; its events are in `record`."""

    completion: Completion
    ended_s: float
    record: Record


class History:
    """What ended; an id that was used again stands for its last request."""

    def __init__(self, max_requests: int, clock: Clock) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._ended: OrderedDict[RequestId, Ended] = OrderedDict()

    def add(self, completion: Completion, record: Record) -> None:
        """A request ended now."""
        self._ended.pop(completion.request_id, None)
        self._ended[completion.request_id] = Ended(completion, self._clock.now_s(), record)
        if len(self._ended) > self._max_requests:
            self._ended.popitem(last=False)

    def find(self, request_id: RequestId) -> Ended | None:
        """How a request ended; None if it is not known (any more)."""
        return self._ended.get(request_id)

    def explain(self, ended: Ended) -> list[Finding]:
        """What a request suffered from, beside what all took that are remembered."""
        return explain(ended.completion, usual_of(self.since(float("inf"))))

    def ended_within(self, window_s: float) -> list[Ended]:
        """Requests that ended within the last `window_s`, in that order."""
        oldest_s = self._clock.now_s() - window_s
        return [ended for ended in self._ended.values() if ended.ended_s >= oldest_s]

    def latest(self, num_requests: int) -> list[Ended]:
        """The last so many that ended, however they did, the last one first."""
        return list(islice(reversed(self._ended.values()), num_requests))

    def since(self, window_s: float) -> list[Completion]:
        """Requests that ended well within the last `window_s`."""
        return [ended.completion for ended in self.ended_within(window_s) if _is_whole(ended)]


def _is_whole(ended: Ended) -> bool:
    return ended.completion.finish_reason is not FinishReason.ERROR
