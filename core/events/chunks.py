"""What was computed of one prompt, chunk by chunk, at the worker that reads it."""

from core.events.event import BoundedEvents, Event, EventKind
from core.timeline import PrefillReport

# Neighbours are told together where there were more.
MAX_EVENTS = 32


class Chunks:
    """Of one prompt, so far."""

    def __init__(self) -> None:
        self.num = 0
        self._compute_s = 0.0
        self._events = BoundedEvents(MAX_EVENTS)

    def add(self, num_tokens: int, num_prompts: int, compute_s: float, now_s: float) -> None:
        """A step with so many of its tokens, and of prompts, took `compute_s` and ended now."""
        self._events.add(
            Event(
                EventKind.CHUNK,
                begin_s=now_s - compute_s,
                end_s=now_s,
                index=self.num,
                busy_s=compute_s,
                num_tokens=num_tokens,
                num_sequences=num_prompts,
            )
        )
        self.num += 1
        self._compute_s += compute_s

    def report(self, since_s: float, num_cached_tokens: int, now_s: float) -> PrefillReport:
        """What was measured of a prompt that has waited since `since_s` and is read now."""
        chunks = self._events.all()
        begun_s = chunks[0].begin_s
        queue = Event(EventKind.QUEUE, since_s, begun_s, num_cached_tokens=num_cached_tokens)
        return PrefillReport(
            queue_s=now_s - since_s - self._compute_s,
            prefill_s=self._compute_s,
            num_cached_tokens=num_cached_tokens,
            num_chunks=self.num,
            events=(queue, *chunks),
        )
