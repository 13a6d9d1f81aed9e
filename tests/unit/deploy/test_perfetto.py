"""One file for Perfetto: only documented fields, slices that nest, arrows between slices."""

import json
from collections import defaultdict

import pytest

from core.events.event import ROUTER, Event, EventKind
from core.events.step import StepFacts
from core.events.timeline import Timeline
from core.timeline import Phases
from deploy.perfetto import trace
from tests.unit.deploy.test_phase_bar import completion

# Trace Event Format: fields that every event of a phase has, and those that it may have.
REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ph", "ts", "s", "pid", "tid"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def timeline_of(request_id, begin_s):
    """Of a request like others: two chunks, three pushes of which two overlap, a gap."""
    kind = EventKind

    def at(what, begin, end, where=ROUTER, **numbers):
        return Event(what, begin_s + begin, begin_s + end, where, **numbers)

    events = [
        at(kind.RECEIVED, 0, 0),
        at(kind.TOKENIZE, 0, 0.1),
        at(kind.LINE, 0.1, 0.2),
        at(
            kind.PLACED,
            0.2,
            0.2,
            note="prefill-0 has 0 prompt tokens to read; decode-0 has 4 of 64 slots in use",
        ),
        at(kind.RESERVE, 0.2, 0.3),
        at(kind.QUEUE, 0.3, 0.5, "prefill-0"),
        at(kind.CHUNK, 0.5, 1.0, "prefill-0", num_tokens=512),
        at(kind.PUSH, 0.9, 1.2, "prefill-0", num_bytes=10),
        at(kind.CHUNK, 1.0, 1.5, "prefill-0", num_tokens=100),
        at(kind.PUSH, 1.1, 1.4, "prefill-0", num_bytes=10),
        at(kind.TRANSFER, 1.5, 1.8, "prefill-0"),
        at(kind.FIRST_TOKEN, 1.55, 1.75),
        at(kind.SEALED, 1.7, 1.7, "decode-0"),
        at(kind.SLOT_WAIT, 1.7, 1.9, "decode-0"),
        at(kind.DELIVERIES, 1.75, 3.3, count=9),
        at(kind.STEPS, 1.9, 2.5, "decode-0", index=1, count=6),
        at(kind.GAP, 2.5, 3.2, "decode-0", index=7, request_ids=("other",)),
        at(kind.LAST_TOKEN, 3.2, 3.3),
        at(kind.END, 3.35, 3.35),
    ]
    done = completion(Phases(prefill_s=1.0, total_s=3.35))
    return Timeline(done, tuple(events), is_running=False, now_s=9.0, now_wall_s=9.0)


@pytest.fixture(scope="module")
def written():
    """Three requests at once, steps of a decode worker, a scaling decision."""
    timelines = [timeline_of(f"r{number}", 100.0 + number / 3) for number in range(3)]
    steps = [StepFacts(100.0 + i / 10, 0.1, 3, 40, (("r1", 5),) * (i % 2)) for i in range(1, 9)]
    decision = {"now_s": 101.0, "sentence": "decode 1 -> 2 (late)", "actions": [{}]}
    return json.loads(json.dumps(trace(timelines, {"decode-0": steps}, [decision])))


def test_events_have_the_fields_of_the_format_and_no_others(written):
    assert set(written) == {"traceEvents", "displayTimeUnit"}
    for event in written["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event) <= REQUIRED[event["ph"]] | {"args"}
        assert event["ts"] >= 0 and event.get("dur", 1) > 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA


def test_every_process_and_thread_has_a_name_of_its_own(written):
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in written["traceEvents"]
        if "name" in e.get("args", {})
    }
    processes = [name for (_, tid), name in names.items() if tid == 0]
    assert processes == ["router", "prefill-0", "links from prefill-0", "decode-0", "scaling"]
    shown = {(e["pid"], e["tid"]) for e in written["traceEvents"] if e["ph"] != "M"}
    assert shown <= set(names)


def test_slices_of_a_thread_follow_each_other_or_nest(written):
    threads = defaultdict(list)
    for event in written["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) > 8
    for slices in threads.values():
        open_ends = []
        for begin, end in sorted(slices, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 0.001:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.001
            open_ends.append(end)


def test_arrows_lead_through_each_request_from_slice_to_slice(written):
    events = written["traceEvents"]
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] in ("X", "i")}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            assert (event["pid"], event["tid"], event["ts"]) in begins
            arrows[event["id"]].append(event["ph"])
    assert list(arrows.values()) == [["s", "t", "t", "t", "f"]] * 3


def test_nothing_to_show_is_a_file_without_events():
    assert trace([], {}) == {"traceEvents": [], "displayTimeUnit": "ms"}
