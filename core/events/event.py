"""One thing that happened to a request: when, where, and its few numbers.

Each process stamps events with its own monotonic clock. A worker's travel with the reports that it
makes anyway; the router moves them to its own clock (`clock_offset`) as they arrive, and keeps them
with what ended lately.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from core.request import RequestId

ROUTER = "router"
# Whose prompts were read in one gap, at most.
MAX_NAMED = 4


class EventKind(StrEnum):
    """What happened; instants begin and end at once.

    At the router::

        received       instant: the request was unpacked
        tokenize       prompt text to token ids
        line           admitted, until workers were chosen (of a further answer to the same prompt
                       also the wait for the first; of a later attempt, since the last one failed)
        placed         instant: workers were chosen; note says why
        reserve        decode was asked for blocks, until it granted them
        first_token    its arrival, until it was handed to the transport
        deliveries     first to last delivery; count of them
        slow_delivery  one that took long: the client, or the way to it, is slow
        last_token     its arrival, until it was handed to the transport
        failed         an attempt that a worker failed, from its placement; note says why
        end            instant: the answer is complete, or given up

    At the worker that reads the prompt (index, count: chunks; tokens of the prompt)::

        queue          its arrival there, until its first chunk began
        chunk          one step with tokens of it; num_sequences prompts were in it

    At the prefill worker, towards decode (index, count: pieces)::

        push           layers of some blocks: handed to the link, until decode acknowledged them
        transfer       the last chunk was computed, until the KV cache was sealed

    At the decode worker (index, count: places in the answer, steps)::

        sealed         instant: the prompt's KV cache is complete
        slot_wait      sealed, until the next decode step began
        steps          steps of similar length, one token each
        gap            one step, or several in which it took no part, that made a token late;
                       num_tokens of the prompts of request_ids were read in it
    """

    RECEIVED = "received"
    TOKENIZE = "tokenize"
    LINE = "line"
    PLACED = "placed"
    RESERVE = "reserve"
    QUEUE = "queue"
    CHUNK = "chunk"
    PUSH = "push"
    TRANSFER = "transfer"
    FIRST_TOKEN = "first_token"
    SEALED = "sealed"
    SLOT_WAIT = "slot_wait"
    STEPS = "steps"
    GAP = "gap"
    DELIVERIES = "deliveries"
    SLOW_DELIVERY = "slow_delivery"
    LAST_TOKEN = "last_token"
    FAILED = "failed"
    END = "end"


@dataclass(frozen=True, slots=True)
class Event:
    """One event, or several like it that follow each other; numbers that do not apply are 0.

    where is a worker's name or ROUTER, and empty at the worker itself. begin_s and end_s may both
    be off by uncertainty_s: how well that worker's clock is known. Of the span, busy_s was spent
    computing. num_sequences and num_history_tokens are the most that one of its steps had.
    """

    kind: EventKind
    begin_s: float
    end_s: float
    where: str = ""
    attempt: int = 1
    uncertainty_s: float = 0.0
    index: int = 0
    count: int = 1
    busy_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_bytes: int = 0
    first_layer: int = 0
    num_layers: int = 0
    num_sequences: int = 0
    num_history_tokens: int = 0
    request_ids: tuple[RequestId, ...] = ()
    note: str = ""

    @property
    def duration_s(self) -> float:
        """Its length; 0 for an instant."""
        return self.end_s - self.begin_s

    def joined(self, later: "Event") -> "Event":
        """Both as one event; a gap among steps becomes part of them."""
        first_layer = min(self.first_layer, later.first_layer)
        end_layer = max(event.first_layer + event.num_layers for event in (self, later))
        is_gap = self.kind is later.kind is EventKind.GAP
        return replace(
            self,
            kind=EventKind.STEPS if self.kind is EventKind.GAP and not is_gap else self.kind,
            end_s=max(self.end_s, later.end_s),
            count=self.count + later.count,
            busy_s=self.busy_s + later.busy_s,
            num_tokens=self.num_tokens + later.num_tokens,
            num_cached_tokens=self.num_cached_tokens + later.num_cached_tokens,
            num_bytes=self.num_bytes + later.num_bytes,
            first_layer=first_layer,
            num_layers=end_layer - first_layer,
            num_sequences=max(self.num_sequences, later.num_sequences),
            num_history_tokens=max(self.num_history_tokens, later.num_history_tokens),
            request_ids=tuple(dict.fromkeys(self.request_ids + later.request_ids))[:MAX_NAMED],
        )


class BoundedEvents:
    """Events in order of their begin, at most so many: the two shortest neighbours become one."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """The next one; of the same family as those before, so that any two may be joined."""
        self._events.append(event)
        if len(self._events) > self._max_events:
            self._join_the_shortest()

    def all(self) -> tuple[Event, ...]:
        """Those of now."""
        return tuple(self._events)

    def _join_the_shortest(self) -> None:
        events = self._events
        pairs = range(len(events) - 1)
        shortest = min(pairs, key=lambda i: events[i + 1].end_s - events[i].begin_s)
        events[shortest : shortest + 2] = [events[shortest].joined(events[shortest + 1])]
