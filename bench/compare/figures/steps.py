"""What each worker's device did around one long prompt: each step of the scheduler as a bar.

One lane a worker, one group of lanes a way, the same span of the same schedule in each. A bar is as
high as its batch: a decode step by its sequences, a step that reads a prompt is full. A chunked
step that does both is divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.figures.canvas import Canvas, Scale
from bench.compare.run import Comparison, Played
from core.events.step_log import StepRecord
from core.worker import Role

WIDTH, LANE, GAP, HEAD, TOP, LEFT, RIGHT = 960, 34, 6, 28, 30, 84, 62
BEFORE_S, AFTER_S = 1.5, 8.5
LABEL_WIDTH = 34


@dataclass(frozen=True, slots=True)
class Window:
    """The span that is shown, in seconds of the schedule, and the prompt that it is about."""

    begin_s: float
    end_s: float
    due_s: float
    num_tokens: int

    @classmethod
    def around_the_longest(cls, played: Played) -> "Window":
        """Around the arrival of the longest prompt that others run beside."""
        asks = [answer.ask for answer in played.answers]
        # The first prompts find an idle cluster: nobody is disturbed.
        later = asks[len(asks) // 4 :]
        longest = max(later, key=lambda ask: len(ask.prompt))
        begin_s = max(longest.due_s - BEFORE_S, 0.0)
        return cls(begin_s, begin_s + BEFORE_S + AFTER_S, longest.due_s, len(longest.prompt))


def draw_steps(comparison: Comparison, workload: str) -> Canvas:
    """The first round of each way."""
    rounds = [comparison.played(workload, way)[0] for way in comparison.plan.ways]
    window = Window.around_the_longest(rounds[0])
    steps = [
        {worker: _seen(records, one, window) for worker, records in lanes.items()}
        for one in rounds
        for lanes in [comparison.steps[one.way]]
    ]
    num_lanes = sum(len(lanes) for lanes in steps)
    height = TOP + len(rounds) * HEAD + num_lanes * (LANE + GAP) + 40
    canvas = Canvas(WIDTH, height, f"steps of each worker around a long prompt, {workload}")
    canvas.legend(
        LEFT,
        16,
        [("prefill", "reads a prompt (tokens)"), ("decode", "decode step (height: batch)")],
    )
    batches = (s.num_decoding for lanes in steps for seen in lanes.values() for s in seen)
    most = max(batches, default=1)
    x = Scale(window.begin_s, window.end_s, LEFT, WIDTH - RIGHT)
    top = float(TOP)
    for one, lanes in zip(rounds, steps, strict=True):
        canvas.text(LEFT, top + HEAD - 8, one.way, kind="title", colour=one.way)
        top += HEAD
        begin = top
        for worker in sorted(lanes, key=_order):
            _lane(canvas, worker, lanes[worker], x, top, max(most, 1))
            top += LANE + GAP
        at = x(window.due_s)
        canvas.line((at, begin - 4, at, top - GAP), "mark", width=1.4, dash="4 3")
    for tick in x.ticks(10):
        canvas.text(x(tick), top + 12, f"{tick:g}", kind="muted small", anchor="middle")
    words = (
        f"seconds since the round began; dashed: a prompt of {window.num_tokens} tokens arrives; "
        "right: share of the span that the device was busy"
    )
    canvas.text(WIDTH - RIGHT, top + 29, words, kind="muted small", anchor="end")
    return canvas


def _seen(records: Sequence[StepRecord], played: Played, window: Window) -> list[StepRecord]:
    """Steps of the window, their times of the schedule, cut at its ends."""
    found = []
    for record in records:
        ended_s = record.ended_s - played.started_s
        begin_s = max(ended_s - record.step_s, window.begin_s)
        ended_s = min(ended_s, window.end_s)
        if ended_s > begin_s:
            found.append(
                StepRecord(
                    ended_s, ended_s - begin_s, record.num_decoding, record.num_prompt_tokens
                )
            )
    return found


def _order(worker: str) -> tuple[bool, str]:
    """Prefill first, as a prompt meets them."""
    return not worker.startswith(Role.PREFILL), worker


def _lane(
    canvas: Canvas, worker: str, steps: Sequence[StepRecord], x: Scale, top: float, most: int
) -> None:
    canvas.rect(x.start, top, x.end - x.start, LANE, "panel")
    canvas.text(x.start - 8, top + LANE / 2 + 4, worker, kind="muted small", anchor="end")
    for step in steps:
        left, right = x(step.ended_s - step.step_s), x(step.ended_s)
        # A hair of the lane between two steps tells them apart.
        width = max(right - left - 0.5, 0.4)
        tall = LANE * min(0.25 + 0.75 * step.num_decoding / most, 1.0)
        if step.num_prompt_tokens:
            canvas.rect(left, top, width, LANE, "prefill")
            if width > LABEL_WIDTH:
                middle, words = (left + right) / 2, str(step.num_prompt_tokens)
                canvas.text(middle, top + 13, words, kind="small", anchor="middle", colour="on")
            tall = LANE * 0.6 * step.num_decoding / most
        if step.num_decoding:
            canvas.rect(left, top + LANE - tall, width, tall, "decode")
    busy = sum(step.step_s for step in steps) / (x.high - x.low)
    canvas.text(x.end + 8, top + LANE / 2 + 4, f"{busy:.0%}", kind="small")
