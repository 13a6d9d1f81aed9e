"""Few events for much that happened, and one clock for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.events.clock_offset import NUM_SAMPLES, ClockOffset
from core.events.event import BoundedEvents, Event, EventKind


def steps(begin_s, end_s, **numbers):
    return Event(EventKind.STEPS, begin_s, end_s, **numbers)


def test_the_shortest_neighbours_become_one_and_nothing_is_lost():
    events = BoundedEvents(3)
    for begin_s, end_s in [(0, 4), (4, 5), (5, 7), (7, 20)]:
        events.add(steps(begin_s, end_s, index=begin_s, num_tokens=1, busy_s=0.5))
    assert [(e.begin_s, e.end_s, e.count) for e in events.all()] == [
        (0, 4, 1),
        (4, 7, 2),
        (7, 20, 1),
    ]
    assert sum(event.num_tokens for event in events.all()) == 4
    assert sum(event.busy_s for event in events.all()) == 2.0


def test_a_long_gap_outlives_the_short_ones():
    events = BoundedEvents(3)
    events.add(steps(0.0, 0.1))
    events.add(Event(EventKind.GAP, 0.1, 9.0, request_ids=("long",)))
    for number in range(20):
        begin_s = 9.0 + number / 10
        events.add(steps(begin_s, begin_s + 0.05))
        events.add(Event(EventKind.GAP, begin_s + 0.05, begin_s + 0.1))
    (gap,) = [event for event in events.all() if event.kind is EventKind.GAP]
    assert (gap.begin_s, gap.end_s, gap.request_ids) == (0.1, 9.0, ("long",))
    assert sum(event.count for event in events.all()) == 42


def test_pieces_that_are_told_together_cover_the_layers_of_both():
    first = Event(EventKind.PUSH, 0.0, 1.0, first_layer=4, num_layers=2, num_bytes=10)
    both = first.joined(Event(EventKind.PUSH, 0.5, 2.0, first_layer=0, num_layers=4, num_bytes=5))
    assert (both.kind, both.begin_s, both.end_s) == (EventKind.PUSH, 0.0, 2.0)
    assert (both.first_layer, both.num_layers, both.num_bytes, both.count) == (0, 6, 15, 2)


class TestClockOffset:
    @given(
        ahead_s=st.floats(-1e5, 1e5),
        ways=st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=40),
    )
    def test_is_off_by_no_more_than_it_says(self, ahead_s, ways):
        offset, now_s = ClockOffset(), 1000.0
        for there_s, back_s in ways:
            offset.sample(now_s, now_s + there_s + ahead_s, now_s + there_s + back_s)
            now_s += 1.0
        clock = offset.of("worker")
        assert abs(clock.offset_s - ahead_s) <= clock.uncertainty_s + 1e-9
        shortest_s = min(sum(way) for way in ways[-NUM_SAMPLES:])
        assert shortest_s / 2 - 1e-9 <= clock.uncertainty_s <= shortest_s + 1e-9

    def test_of_a_worker_on_the_same_host_is_zero(self):
        offset = ClockOffset()
        offset.sample(5.0, 5.001, 5.008)
        assert offset.of("worker").offset_s == 0.0
        assert offset.of("worker").uncertainty_s == pytest.approx(0.007)

    def test_moves_what_the_worker_stamped_to_our_clock(self):
        offset = ClockOffset()
        offset.sample(5.0, 905.25, 5.5)
        moved = offset.of("worker").moved(steps(907.0, 908.0))
        assert (moved.begin_s, moved.end_s, moved.where) == (7.0, 8.0, "worker")
        assert moved.uncertainty_s == 0.25

    def test_a_worker_without_a_clock_is_taken_for_one_of_this_host(self):
        offset = ClockOffset()
        offset.sample(5.0, 0.0, 6.0)
        assert offset.of("worker").offset_s == offset.of("worker").uncertainty_s == 0.0
