"""The waterfall of one request, at the widths that terminals have."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from core.events.clock_offset import WorkerClock
from core.events.event import Event, EventKind
from deploy.commands.timeline import show
from tests.unit.deploy.test_perfetto import timeline_of


def shown(timeline, width=80, **options):
    out = Console(width=width, file=StringIO(), color_system=None)
    show(out, timeline, **options)
    return out.file.getvalue().splitlines()


def row(lines, label):
    return next(line for line in lines if line.startswith(label))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_fits_the_terminal_and_bars_are_where_things_happened(width):
    lines = shown(timeline_of("r", 100.0), width)
    assert max(map(len, lines)) <= width
    bar = {label: row(lines, label).index("\u2588") for label in ("queue", "chunk", "steps", "gap")}
    assert bar["queue"] < bar["chunk"] < bar["steps"] < bar["gap"]
    assert "700 ms" in row(lines, "gap")


def test_each_place_is_a_section_that_says_how_sure_its_clock_is():
    clocks = (WorkerClock("prefill-0", 0.0, 0.001), WorkerClock("decode-0", -812.5, 0.002))
    lines = shown(replace(timeline_of("r", 100.0), clocks=clocks), 120)
    assert "same clock +-1.0 ms" in row(lines, "prefill-0")
    assert "clock -812.500 s +-2.0 ms" in row(lines, "decode-0")


def test_a_gap_says_whose_prompt_was_read_in_it():
    timeline = timeline_of("r", 100.0)
    gap = Event(EventKind.GAP, 102.5, 103.2, "decode-0", num_tokens=64, request_ids=("a[b]", "c"))
    lines = shown(replace(timeline, events=(*timeline.events, gap)), 120)
    assert any("64 prompt tokens of a[b], c read" in line for line in lines)


def test_many_chunks_are_told_together_unless_all_are_wanted():
    timeline = timeline_of("r", 100.0)
    chunks = [
        Event(EventKind.CHUNK, 101.5 + i / 100, 101.51 + i / 100, "prefill-0", num_tokens=8)
        for i in range(20)
    ]
    timeline = replace(timeline, events=(*timeline.events, *chunks))
    few = [line for line in shown(timeline, 120) if line.startswith("chunk")]
    every = [line for line in shown(timeline, 120, every=True) if line.startswith("chunk")]
    assert (len(few), len(every)) == (8, 22)
    assert any("in 3 chunks" in line for line in few)


def test_a_running_request_is_told_as_far_as_it_is():
    lines = shown(replace(timeline_of("r", 100.0), is_running=True))
    assert lines[0].endswith("runs, 3.35 s")


def test_why_it_was_placed_is_told_in_full():
    timeline = timeline_of("r", 100.0)
    why = next(event.note for event in timeline.events if event.kind is EventKind.PLACED)
    assert f"placed: {why}" in " ".join(shown(timeline, 80))
