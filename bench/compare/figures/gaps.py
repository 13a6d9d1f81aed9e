"""ITL over time: one panel for each way, with the moment when each long prompt arrived marked."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.figures.canvas import Canvas, Scale
from bench.compare.metrics import Spread, percentile
from bench.compare.run import Comparison, Played
from bench.load import Gap

WIDTH, PANEL, HEAD, TOP, LEFT, RIGHT = 960, 132, 30, 30, 58, 14
LOWEST_MS = 5.0
LONG_PERCENT = 75
ROW, MAX_ROWS = 5, 4


@dataclass(frozen=True, slots=True)
class Reading:
    """A long prompt from when it was due until its first token came, in seconds of the schedule."""

    due_s: float
    first_token_s: float
    num_tokens: int


def long_prompts(played: Played) -> list[Reading]:
    """Those of the longest quarter of the round's prompts, in the order of the schedule."""
    least = percentile((len(answer.ask.prompt) for answer in played.answers), LONG_PERCENT)
    return [
        Reading(answer.ask.due_s, timing.first_token_s - played.started_s, len(answer.ask.prompt))
        for answer in played.answers
        if len(answer.ask.prompt) >= least and (timing := answer.timing()) is not None
    ]


def draw_gaps(comparison: Comparison, workload: str) -> Canvas:
    """The first round of each way; all panels share both axes."""
    rounds = [comparison.played(workload, way)[0] for way in comparison.plan.ways]
    height = TOP + len(rounds) * (HEAD + PANEL) + 36
    canvas = Canvas(WIDTH, height, f"gaps between tokens over time, workload {workload}")
    entries = [
        ("quiet", "gap before a token"),
        ("hit", "gap while a long prompt waited or was read"),
        ("mark", "long prompt, from its arrival to its first token"),
    ]
    canvas.legend(LEFT, 16, entries)
    gaps = [gap for one in rounds for gap in _gaps(one)]
    most_ms = max((gap.seconds * 1e3 for gap in gaps), default=0.0)
    end_s = max((_end_s(one) for one in rounds), default=1.0)
    x = Scale(0.0, end_s, LEFT, WIDTH - RIGHT)
    bottom = float(TOP)
    for one in rounds:
        top, bottom = bottom + HEAD, bottom + HEAD + PANEL
        y = Scale(LOWEST_MS, max(most_ms * 1.6, 100.0), bottom, top, is_log=True)
        _panel(canvas, one, x, y, limit_ms=comparison.plan.slo.itl_s * 1e3)
    for tick in x.ticks(10):
        canvas.text(x(tick), bottom + 16, f"{tick:g}", kind="muted small", anchor="middle")
    words = "seconds since the round began; the dotted line is the ITL objective"
    canvas.text(WIDTH - RIGHT, bottom + 32, words, kind="muted small", anchor="end")
    return canvas


def _gaps(played: Played) -> list[Gap]:
    """Of tokens that did not come in one message."""
    gaps = (gap for answer in played.answers for gap in answer.log.gaps())
    return [gap for gap in gaps if gap.seconds > 0]


def _end_s(played: Played) -> float:
    last_s = [a.log.arrivals[-1].at_s for a in played.answers if a.log.arrivals]
    return max(last_s, default=played.started_s + 1.0) - played.started_s


def _panel(canvas: Canvas, played: Played, x: Scale, y: Scale, *, limit_ms: float) -> None:
    top, bottom = y.end, y.start
    canvas.rect(x.start, top, x.end - x.start, bottom - top, "panel")
    for tick in y.ticks():
        canvas.line((x.start, y(tick), x.end, y(tick)), "grid")
        words = f"{tick:g} ms" if tick < 1000 else f"{tick / 1000:g} s"
        canvas.text(x.start - 7, y(tick) + 4, words, kind="muted small", anchor="end")
    canvas.line((x.start, y(limit_ms), x.end, y(limit_ms)), "muted", dash="1 4")
    readings = long_prompts(played)
    for reading, row in zip(readings, _rows(readings), strict=True):
        at = x(reading.due_s)
        canvas.line((at, top, at, bottom), "mark", width=0.8, dash="3 3")
        canvas.rect(at, top + 2 + ROW * row, x(reading.first_token_s) - at, ROW - 1.5, "mark")
    gaps = _gaps(played)
    for is_hit, colour, size in ((False, "quiet", 3.0), (True, "hit", 4.0)):
        points = [
            (x(gap.ended_s - played.started_s), y(gap.seconds * 1e3))
            for gap in gaps
            if _is_hit(gap, played.started_s, readings) is is_hit
        ]
        canvas.dots(points, colour, size=size, opacity=0.75)
    spread = Spread.of(gap.seconds * 1e3 for gap in gaps)
    words = f"p50 {spread.p50:.0f}, p99 {spread.p99:.0f}, longest {spread.max:.0f} ms"
    canvas.text(x.start, top - 8, played.way, kind="title", colour=played.way)
    canvas.text(x.end, top - 8, words, kind="small", anchor="end")


def _is_hit(gap: Gap, started_s: float, readings: Sequence[Reading]) -> bool:
    return any(
        gap.overlaps(started_s + reading.due_s, started_s + reading.first_token_s)
        for reading in readings
    )


def _rows(readings: Sequence[Reading]) -> list[int]:
    """For each the first row that is free when it begins; the last row takes what has none."""
    free_from_s = [0.0] * MAX_ROWS
    rows = []
    for reading in readings:
        free = (row for row, at_s in enumerate(free_from_s) if at_s <= reading.due_s)
        row = next(free, MAX_ROWS - 1)
        free_from_s[row] = reading.first_token_s
        rows.append(row)
    return rows
