"""`twophase timeline`: what happened to a request, as a waterfall or as a file for Perfetto."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from core.errors import ConfigError
from core.events.event import BoundedEvents, Event, EventKind
from core.events.timeline import Timeline
from deploy.commands.connection import DEFAULT_ADDRESS, Address, connect
from deploy.commands.phase_bar import duration, phase_bar, phase_legend, summary
from deploy.commands.request_id import HELP, found
from deploy.commands.scaling import log_errors
from deploy.decision_log import Entry, entries
from deploy.perfetto import trace

# Rows of chunks, of pushes and of decode steps, unless all are wanted.
MAX_ROWS = 8
LABEL_WIDTH = 13
TIME_WIDTH = 7
# Between the columns.
NUM_SPACES = 4
_COLOURS = {
    EventKind.RESERVE: "yellow",
    EventKind.QUEUE: "red",
    EventKind.CHUNK: "blue",
    EventKind.PUSH: "magenta",
    EventKind.TRANSFER: "bright_magenta",
    EventKind.SLOT_WAIT: "bright_red",
    EventKind.STEPS: "green",
    EventKind.GAP: "red",
    EventKind.FAILED: "red",
    EventKind.SLOW_DELIVERY: "red",
    EventKind.DELIVERIES: "cyan",
    EventKind.FIRST_TOKEN: "cyan",
    EventKind.LAST_TOKEN: "cyan",
}
_FAMILIES = {
    EventKind.CHUNK: EventKind.CHUNK,
    EventKind.PUSH: EventKind.PUSH,
    EventKind.STEPS: EventKind.STEPS,
    EventKind.GAP: EventKind.STEPS,
}


def timeline(
    request_id: Annotated[str | None, typer.Argument(help=HELP)] = None,
    address: Address = DEFAULT_ADDRESS,
    every: Annotated[bool, typer.Option("--all", help="Each event in a row of its own.")] = False,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write all requests to this file, for ui.perfetto.dev.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of so many last minutes.", min=0.1)] = 10.0,
    scaling_log: Annotated[
        Path | None, typer.Option(help="The file that scaling.log names; on the router's host.")
    ] = None,
) -> None:
    """Show what happened to a request, when and where; or write all of them to a file."""
    if (request_id is None) == (perfetto is None):
        raise typer.BadParameter("give either a request's id or --perfetto FILE")
    out = Console()
    if perfetto is not None:
        _write(out, perfetto, address, minutes * 60, scaling_log)
    elif request_id is not None:
        with connect(address) as client:
            show(out, found(client.admin.timeline, request_id), every=every)


def show(out: Console, told: Timeline, *, every: bool = False) -> None:
    """Print a timeline: a section for each place, a row for each event, all on one scale."""
    completion, events = told.completion, told.events if every else _fewer(told.events)
    begin_s, end_s = events[0].begin_s, max(event.end_s for event in events)
    state = "runs" if told.is_running else f"ended ({completion.finish_reason})"
    out.print(
        f"request {escape(completion.request_id)} {state}, {duration(end_s - begin_s)}",
        highlight=False,
    )
    room = max(out.width - LABEL_WIDTH - 2 * TIME_WIDTH - NUM_SPACES, 20)
    width = room // 2
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=LABEL_WIDTH, no_wrap=True)
    table.add_column(min_width=width, no_wrap=True)
    table.add_column(min_width=TIME_WIDTH, justify="right", no_wrap=True)
    table.add_column(min_width=TIME_WIDTH, justify="right", no_wrap=True)
    table.add_column(width=room - width, no_wrap=True, overflow="ellipsis", style="dim")
    for where in dict.fromkeys(event.where for event in events):
        table.add_row(Text(where, style="bold"), "", "at", "took", _clock_of(told, where))
        for event in events:
            if event.where == where:
                bar = _bar(event, begin_s, end_s, width)
                at, took = duration(event.begin_s - begin_s), _took(event)
                label = Text(event.kind.replace("_", " "))
                table.add_row(label, bar, at, took, Text(_detail(event)))
    out.print(table)
    for placed in (event for event in events if event.kind is EventKind.PLACED and event.note):
        out.print(f"placed: {escape(placed.note)}", style="dim", highlight=False)
    if not told.is_running:
        out.print(phase_bar(completion).append("  ").append_text(phase_legend(completion)))
    out.print(summary(completion), style="dim", highlight=False)
    for failure in completion.failures:
        out.print(f"went on elsewhere after {failure}", style="yellow", highlight=False)


def _fewer(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with chunks, pushes and steps of each worker told together."""
    families: dict[tuple[EventKind, str, int], BoundedEvents] = {}
    others = []
    for event in events:
        if event.kind in _FAMILIES:
            family = _FAMILIES[event.kind], event.where, event.attempt
            families.setdefault(family, BoundedEvents(MAX_ROWS)).add(event)
        else:
            others.append(event)
    together = [event for family in families.values() for event in family.all()]
    return tuple(sorted([*others, *together], key=lambda event: (event.begin_s, event.end_s)))


def _bar(event: Event, begin_s: float, end_s: float, width: int) -> Text:
    """The event on the scale of the whole: full cells, or a stroke where it is shorter than one."""
    cells_per_s = width / ((end_s - begin_s) or 1.0)
    first = min(int((event.begin_s - begin_s) * cells_per_s), width - 1)
    length = min(round(event.duration_s * cells_per_s), width - first)
    drawn = "\u2588" * length if length else "\u258f"
    return Text(" " * first).append(drawn, style=_COLOURS.get(event.kind, "bright_black"))


def _took(event: Event) -> str:
    return duration(event.duration_s) if event.duration_s > 0 else ""


def _clock_of(told: Timeline, where: str) -> str:
    """How far this place's clock is ahead of the router's."""
    clock = next((clock for clock in told.clocks if clock.worker == where), None)
    if clock is None:
        return ""
    sure = f"+-{duration(clock.uncertainty_s)}"
    return f"clock {clock.offset_s:+.3f} s {sure}" if clock.offset_s else f"same clock {sure}"


def _detail(event: Event) -> str:
    """The numbers of one event in words."""
    match event.kind:
        case EventKind.QUEUE:
            return (
                f"{event.num_cached_tokens} tokens were cached" if event.num_cached_tokens else ""
            )
        case EventKind.CHUNK:
            beside = f", batch {event.num_sequences}" if event.num_sequences > 1 else ""
            return f"{event.num_tokens} tokens{_times(event, 'chunks')}{beside}"
        case EventKind.PUSH:
            last = event.first_layer + event.num_layers - 1
            size = f"{event.num_bytes / 1e6:.2f} MB"
            return f"{size}, layers {event.first_layer}-{last}{_times(event, 'pieces')}"
        case EventKind.STEPS:
            each = duration(event.duration_s / max(event.count, 1))
            return f"{event.count} x {each}, batch {event.num_sequences}"
        case EventKind.GAP:
            if not event.num_tokens:
                return f"its step took {duration(event.busy_s)}"
            whose = ", ".join(event.request_ids)
            return f"{event.num_tokens} prompt tokens of {whose} read"
        case EventKind.DELIVERIES:
            return f"{event.count} of them"
        case EventKind.PLACED:
            return "why: below" if event.note else ""
        case _:
            return event.note


def _times(event: Event, what: str) -> str:
    return f" in {event.count} {what}" if event.count > 1 else ""


def _decisions(path: Path, since_s: float) -> list[Entry]:
    """What changed something since then, and reloads."""
    with log_errors(path):
        found = [entry for _, entry in entries(path) if entry["now_s"] >= since_s]
    return [entry for entry in found if entry["actions"] or "reload" in entry]


def _write(
    out: Console, path: Path, address: str, window_s: float, scaling_log: Path | None
) -> None:
    with connect(address) as client:
        timelines, steps = client.admin.timelines(window_s), client.admin.steps(window_s)
    since_s = min((told.events[0].begin_s for told in timelines), default=0.0)
    shown = [] if scaling_log is None else _decisions(scaling_log, since_s)
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(trace(timelines, steps, shown), file)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written ({error.strerror})") from error
    num_steps = sum(map(len, steps.values()))
    out.print(
        f"{len(timelines)} requests, {num_steps} decode steps and {len(shown)} scaling decisions "
        f"in {path}: open it at https://ui.perfetto.dev (needs the network; the file stays in the "
        "browser), or in chrome://tracing",
        highlight=False,
        soft_wrap=True,
    )
