"""What happened to a request, event by event: to messages, and back."""

from collections.abc import Iterable

from core.events.clock_offset import WorkerClock
from core.events.event import Event, EventKind
from core.request import RequestId, WorkerName
from twophase.v1 import timeline_pb2 as pb

# Of messages whose times are on the reader's clock already.
OWN_CLOCK = WorkerClock(WorkerName(""))
_PREFIX = "EVENT_KIND_"
_KINDS = {pb.EventKind.Value(f"{_PREFIX}{kind.name}"): kind for kind in EventKind}


def event_to_wire(event: Event) -> pb.Event:
    """One event as a message."""
    return pb.Event(
        kind=f"{_PREFIX}{event.kind.name}",
        begin_s=event.begin_s,
        end_s=event.end_s,
        where=event.where,
        attempt=event.attempt,
        uncertainty_s=event.uncertainty_s,
        index=event.index,
        count=event.count,
        busy_s=event.busy_s,
        num_tokens=event.num_tokens,
        num_cached_tokens=event.num_cached_tokens,
        num_bytes=event.num_bytes,
        first_layer=event.first_layer,
        num_layers=event.num_layers,
        num_sequences=event.num_sequences,
        num_history_tokens=event.num_history_tokens,
        request_ids=event.request_ids,
        note=event.note,
    )


def event_from_wire(message: pb.Event) -> Event:
    """One event from its message, on the sender's clock."""
    return Event(
        kind=_KINDS[message.kind],
        begin_s=message.begin_s,
        end_s=message.end_s,
        where=message.where,
        attempt=message.attempt,
        uncertainty_s=message.uncertainty_s,
        index=message.index,
        count=message.count,
        busy_s=message.busy_s,
        num_tokens=message.num_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_bytes=message.num_bytes,
        first_layer=message.first_layer,
        num_layers=message.num_layers,
        num_sequences=message.num_sequences,
        num_history_tokens=message.num_history_tokens,
        request_ids=tuple(map(RequestId, message.request_ids)),
        note=message.note,
    )


def events_from_wire(messages: Iterable[pb.Event], clock: WorkerClock) -> tuple[Event, ...]:
    """A worker's events on our clock; those of kinds that we do not know are left out."""
    known = (message for message in messages if message.kind in _KINDS)
    return tuple(clock.moved(event_from_wire(message)) for message in known)
