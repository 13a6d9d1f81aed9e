"""Timelines as one file of the Trace Event Format, which Perfetto and chrome://tracing open.

A process each for the router, every worker, the links and scaling; a thread each for what does not
overlap there, so that slices nest. Arrows (flow events) lead from a request's placement over its
chunks and pushes to its decode steps. Times are microseconds since the first event.

The format: "Trace Event Format" (Google), JSON object form; X slices, i instants, s/t/f flows and M
metadata are all that is used.

Pure: values in, a JSON value out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from core.events.event import ROUTER, Event, EventKind
from core.events.step import StepFacts
from core.events.timeline import Timeline
from core.request import WorkerName

# Any: values of all kinds, for json.dump.
Json = dict[str, Any]

PUSHES, DELIVERIES = "pushes", "deliveries"
# Events of one request on one of these threads may overlap.
_OVERLAPPING = (PUSHES, DELIVERIES)
_DELIVERIES = (
    EventKind.FIRST_TOKEN,
    EventKind.DELIVERIES,
    EventKind.SLOW_DELIVERY,
    EventKind.LAST_TOKEN,
)
SCALING = "scaling"
STEPS = "decode steps"
# An arrow leads to the first event of each of these kinds, in this order.
_FLOW = (EventKind.PLACED, EventKind.CHUNK, EventKind.PUSH, EventKind.SLOT_WAIT, EventKind.STEPS)
_FLOW_NAME = "request"
# Of an event, what its name and its place in the picture tell already.
_SHOWN = ("kind", "begin_s", "end_s", "where")


class _Trace:
    """The events so far; processes and threads get their numbers as they are first named."""

    def __init__(self, first_s: float) -> None:
        self.events: list[Json] = []
        self._first_s = first_s
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], list[float]] = {}
        self._num_threads: dict[int, int] = {}
        self._tids: dict[tuple[str, str, int], int] = {}

    def lane(self, process: str, what: str, begin_s: float, end_s: float) -> Json:
        """Process and thread of a slice that overlaps none that was put there before."""
        ends = self._lanes.setdefault((process, what), [])
        number = next((i for i, lane_end_s in enumerate(ends) if lane_end_s <= begin_s), len(ends))
        ends[number : number + 1] = [end_s]
        pid = self._pid(process)
        tid = self._tids.get((process, what, number))
        if tid is None:
            tid = self._num_threads[pid] = self._num_threads.get(pid, 0) + 1
            self._tids[process, what, number] = tid
            self._name("thread", pid, tid, what if number == 0 else f"{what} ({number + 1})")
        return {"pid": pid, "tid": tid}

    def slice(self, name: str, kind: str, begin_s: float, end_s: float, **more: Any) -> None:
        """A span of time, or an instant if it has no length; more are its thread and args."""
        event: Json = {"name": name, "cat": kind, "ts": self._us(begin_s), **more}
        if end_s > begin_s:
            event |= {"ph": "X", "dur": round(self._us(end_s) - event["ts"], 3)}
        else:
            event |= {"ph": "i", "s": "t"}
        self.events.append(event)

    def arrow(self, number: int, points: list[tuple[float, Json]]) -> None:
        """Arrows from slice to slice: when each begins, and its thread."""
        for place, (at_s, thread) in enumerate(points):
            is_last = place == len(points) - 1
            phase = "s" if place == 0 else "f" if is_last else "t"
            flow: Json = {"name": _FLOW_NAME, "cat": _FLOW_NAME, "ph": phase, "id": number}
            self.events.append(flow | {"ts": self._us(at_s), **thread} | _ends(phase))

    def _us(self, at_s: float) -> float:
        return round((at_s - self._first_s) * 1e6, 3)

    def _pid(self, process: str) -> int:
        if process not in self._pids:
            pid = self._pids[process] = len(self._pids) + 1
            self._name("process", pid, 0, process)
        return self._pids[process]

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        metadata: Json = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
        self.events.append({**metadata, "name": f"{what}_name", "args": {"name": name}})
        index = {"sort_index": pid if what == "process" else tid}
        self.events.append({**metadata, "name": f"{what}_sort_index", "args": index})


def _ends(phase: str) -> Json:
    """An arrow ends at the slice that begins there, not at the next one."""
    return {"bp": "e"} if phase == "f" else {}


def trace(
    timelines: Iterable[Timeline],
    steps: Mapping[WorkerName, Iterable[StepFacts]],
    decisions: Iterable[Json] = (),
) -> Json:
    """The whole file.

    Args:
        timelines: of the requests to show.
        steps: of each decode worker, oldest first.
        decisions: lines of the scaling log that changed something, on the router's clock.
    """
    timelines, decisions = list(timelines), list(decisions)
    done = {worker: list(of_worker) for worker, of_worker in steps.items()}
    begins = [timeline.events[0].begin_s for timeline in timelines]
    begins += [
        of_worker[0].ended_s - of_worker[0].step_s for of_worker in done.values() if of_worker
    ]
    begins += [decision["now_s"] for decision in decisions]
    out = _Trace(min(begins, default=0.0))
    for number, timeline in enumerate(sorted(timelines, key=lambda t: t.events[0].begin_s), 1):
        _add_request(out, number, timeline)
    for worker, of_worker in done.items():
        _add_steps(out, worker, of_worker)
    for decision in decisions:
        at_s, args = decision["now_s"], {"sentence": decision["sentence"]}
        thread = out.lane(SCALING, "decisions", at_s, at_s)
        out.slice("scaled", SCALING, at_s, at_s, args=args, **thread)
    return {"traceEvents": out.events, "displayTimeUnit": "ms"}


def _add_request(out: _Trace, number: int, timeline: Timeline) -> None:
    request_id, events = timeline.completion.request_id, timeline.events
    begin_s, end_s = events[0].begin_s, max(event.end_s for event in events)
    at_router = out.lane(ROUTER, "requests", begin_s, end_s)
    phases = {f"{name}_s": seconds for name, seconds in timeline.completion.phases.items()}
    args = {"finish_reason": timeline.completion.finish_reason, **phases}
    out.slice(f"request {request_id}", "request", begin_s, end_s, args=args, **at_router)
    flow: dict[EventKind, tuple[float, Json]] = {}
    threads: dict[tuple[str, str], Json] = {(ROUTER, "requests"): at_router}
    for event in events:
        process, what = track = _track(event)
        if what in _OVERLAPPING:
            thread = out.lane(process, what, event.begin_s, event.end_s)
        else:
            thread = threads.get(track) or out.lane(process, what, event.begin_s, end_s)
            threads[track] = thread
        named = event.kind.value if process == ROUTER else f"{event.kind.value} of {request_id}"
        args = {"request_id": request_id, **_args(event)}
        out.slice(named, event.kind.value, event.begin_s, event.end_s, args=args, **thread)
        flow.setdefault(event.kind, (event.begin_s, thread))
    out.arrow(number, [flow[kind] for kind in _FLOW if kind in flow])


def _track(event: Event) -> tuple[str, str]:
    """Process and thread that an event is shown on."""
    if event.kind in (EventKind.PUSH, EventKind.TRANSFER):
        return f"links from {event.where}", PUSHES
    if event.kind in (EventKind.QUEUE, EventKind.CHUNK):
        return event.where, "prefill chunks"
    if event.where != ROUTER:
        return event.where, "sequences"
    return ROUTER, DELIVERIES if event.kind in _DELIVERIES else "requests"


def _args(event: Event) -> Json:
    """What is told of an event beside its name, place and time."""
    args = {name: value for name, value in asdict(event).items() if value and name not in _SHOWN}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in args.items()}


def _add_steps(out: _Trace, worker: WorkerName, steps: list[StepFacts]) -> None:
    for step in steps:
        begin_s = step.ended_s - step.step_s
        thread = out.lane(worker, STEPS, begin_s, step.ended_s)
        args = {
            "num_sequences": step.num_sequences,
            "num_history_tokens": step.num_history_tokens,
            **{f"prompt tokens of {request_id}": num for request_id, num in step.prompts},
        }
        name = "prompts and tokens" if step.prompts else "step"
        out.slice(name, STEPS, begin_s, step.ended_s, args=args, **thread)
