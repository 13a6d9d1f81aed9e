"""A request's timeline: to a message, and back."""

from core.events.clock_offset import WorkerClock
from core.events.timeline import Timeline
from core.request import WorkerName
from twophase.event_wire import event_from_wire, event_to_wire
from twophase.v1 import timeline_pb2 as pb
from twophase.wire import completion_from_wire, completion_to_wire


def timeline_to_wire(timeline: Timeline) -> pb.Timeline:
    """A request's timeline as a message."""
    return pb.Timeline(
        completion=completion_to_wire(timeline.completion),
        events=map(event_to_wire, timeline.events),
        is_running=timeline.is_running,
        now_s=timeline.now_s,
        now_wall_s=timeline.now_wall_s,
        clocks=[
            pb.WorkerClock(
                worker=clock.worker, offset_s=clock.offset_s, uncertainty_s=clock.uncertainty_s
            )
            for clock in timeline.clocks
        ],
    )


def timeline_from_wire(message: pb.Timeline) -> Timeline:
    """A request's timeline from its message."""
    return Timeline(
        completion=completion_from_wire(message.completion),
        events=tuple(event_from_wire(event) for event in message.events),
        is_running=message.is_running,
        now_s=message.now_s,
        now_wall_s=message.now_wall_s,
        clocks=tuple(
            WorkerClock(WorkerName(clock.worker), clock.offset_s, clock.uncertainty_s)
            for clock in message.clocks
        ),
    )
