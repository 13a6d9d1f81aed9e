"""Whatever goes out as bytes comes back as the same value."""

import dataclasses
from typing import get_args

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from core import link, worker
from core.errors import TwophaseError
from tests.unit.twophase import strategies as some
from twophase import (
    event_wire,
    info_wire,
    link_wire,
    listing_wire,
    report_wire,
    signals_wire,
    status_wire,
    timeline_wire,
    wire,
    worker_wire,
)
from twophase.v1 import worker_pb2 as pb

NOW_S = st.floats(-1e6, 1e6)


def over_the_wire(message):
    """What the other process parses."""
    return type(message).FromString(message.SerializeToString())


def comparable(value):
    """Errors compare by kind, text and fields, also inside other values."""
    if isinstance(value, TwophaseError):
        return type(value), str(value), vars(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), {name: comparable(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return tuple(comparable(part) for part in value)
    return value


PAIRS = {
    "sampling": (some.askings, wire.sampling_to_wire, wire.sampling_from_wire),
    "chunk": (some.chunks, wire.chunk_to_wire, wire.chunk_from_wire),
    "timeline": (some.timelines, timeline_wire.timeline_to_wire, timeline_wire.timeline_from_wire),
    "step": (some.steps, event_wire.step_to_wire, event_wire.step_from_wire),
    "finding": (some.findings, report_wire.finding_to_wire, report_wire.finding_from_wire),
    "trouble": (some.troubles, report_wire.trouble_to_wire, report_wire.trouble_from_wire),
    "spread": (some.phase_spreads, report_wire.spread_to_wire, report_wire.spread_from_wire),
    "completion": (some.completions, wire.completion_to_wire, wire.completion_from_wire),
    "chat": (some.conversations, wire.chat_messages_to_wire, wire.chat_messages_from_wire),
    "layout": (some.layouts, info_wire.layout_to_wire, info_wire.layout_from_wire),
    "info": (some.infos, info_wire.info_to_wire, info_wire.info_from_wire),
    "status": (some.statuses, status_wire.status_to_wire, status_wire.status_from_wire),
    "holder": (some.holders, status_wire.holder_to_wire, status_wire.holder_from_wire),
    "demand": (some.demands, signals_wire.demand_to_wire, signals_wire.demand_from_wire),
    "kv totals": (
        some.kv_totals,
        status_wire.kv_totals_to_wire,
        status_wire.kv_totals_from_wire,
    ),
    "stuck": (some.stuck_workers, status_wire.stuck_to_wire, status_wire.stuck_from_wire),
    "listed worker": (
        some.listed_workers,
        listing_wire.listed_worker_to_wire,
        listing_wire.listed_worker_from_wire,
    ),
    "listed request": (
        some.listed_requests,
        listing_wire.listed_request_to_wire,
        listing_wire.listed_request_from_wire,
    ),
    "reservation": (
        some.reservations,
        worker_wire.reservation_to_wire,
        worker_wire.reservation_from_wire,
    ),
    "prefill event": (
        some.prefill_events,
        worker_wire.prefill_event_to_wire,
        worker_wire.prefill_event_from_wire,
    ),
    "update": (some.updates, worker_wire.update_to_wire, worker_wire.update_from_wire),
    "up": (some.ups, link_wire.up_to_wire, link_wire.up_from_wire),
    "down": (some.downs, link_wire.down_to_wire, link_wire.down_from_wire),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
@given(data=st.data())
def test_a_value_comes_back_equal(pair, data):
    values, to_wire, from_wire = pair
    value = data.draw(values)
    assert comparable(from_wire(over_the_wire(to_wire(value)))) == comparable(value)


@given(some.requests, NOW_S, NOW_S)
def test_a_deadline_travels_as_the_seconds_that_remain(request, sent_s, arrived_s):
    message = over_the_wire(worker_wire.request_to_wire(request, sent_s))
    assert message.remaining_s == pytest.approx(request.deadline_s - sent_s)
    other = worker_wire.request_from_wire(message, arrived_s)
    assert other.deadline_s - arrived_s == pytest.approx(request.deadline_s - sent_s, abs=1e-6)
    assert dataclasses.replace(other, deadline_s=request.deadline_s) == request


@given(some.commands, NOW_S)
def test_a_command_comes_back_with_its_deadline_in_the_receivers_time(command, shift_s):
    message = over_the_wire(worker_wire.command_to_wire(command, 0.0))
    other = worker_wire.command_from_wire(message, shift_s)
    if isinstance(command, worker.Reserve):
        assert other.request.deadline_s == command.request.deadline_s + shift_s
        request = dataclasses.replace(other.request, deadline_s=command.request.deadline_s)
        other = dataclasses.replace(other, request=request)
    assert other == command


@given(some.completions)
def test_the_message_of_a_completion_tells_what_no_phase_covers(completion):
    message = wire.completion_to_wire(completion)
    assert message.phases.unaccounted_s == completion.phases.unaccounted_s


@pytest.mark.parametrize("message", [pb.LinkUp(), pb.LinkDown()])
def test_a_link_message_without_content_is_refused(message):
    from_wire = link_wire.up_from_wire if type(message) is pb.LinkUp else link_wire.down_from_wire
    with pytest.raises(ValueError, match="without content"):
        from_wire(message)


@pytest.mark.parametrize(
    ("union", "strategy"),
    [
        (link.LinkUp, some.ups),
        (link.LinkDown, some.downs),
        (worker.DecodeCommand, some.commands),
        (worker.PrefillEvent, some.prefill_events),
    ],
)
def test_every_kind_of_message_is_among_those_that_travel(union, strategy):
    drawn = settings(max_examples=5000, database=None, phases=[Phase.generate])
    for kind in get_args(union):
        assert find(strategy, lambda value, kind=kind: type(value) is kind, settings=drawn)
    with pytest.raises(NoSuchExample):  # and nothing else is
        kinds = set(get_args(union))
        find(strategy, lambda value: type(value) not in kinds, settings=settings(database=None))
