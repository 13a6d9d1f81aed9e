"""Where the time of the mean answer went: one bar for each way, divided by phases."""

from bench.compare.figures.canvas import Canvas
from bench.compare.summary import WaySummary, WorkloadSummary

WIDTH, BAR, GAP, TOP, LEFT, RIGHT = 960, 26, 12, 36, 110, 90
# What is shown apart; phases of one colour are added up.
GROUPS = (
    ("waits for its prefill", "hit", ("place", "recovery", "reserve", "queue")),
    ("prefill", "prefill", ("prefill",)),
    ("exposed transfer", "mark", ("exposed_transfer",)),
    ("waits for a decode step", "other", ("slot_wait",)),
    ("decode", "decode", ("decode",)),
    ("the rest", "quiet", ("tokenize", "delivery", "unaccounted")),
)
LABEL_SHARE = 0.05


def draw_shares(summary: WorkloadSummary) -> Canvas:
    """Bars are as long as the mean answer took, the longest fills the sheet."""
    height = TOP + len(summary.ways) * (BAR + GAP) + 6
    canvas = Canvas(WIDTH, height, f"where the time went, {summary.name}")
    canvas.legend(LEFT, 16, [(colour, words) for words, colour, _ in GROUPS])
    longest_s = max(way.latencies.e2e_s.mean for way in summary.ways) or 1.0
    for index, way in enumerate(summary.ways):
        _bar(canvas, way, TOP + index * (BAR + GAP), longest_s)
    return canvas


def _bar(canvas: Canvas, way: WaySummary, top: float, longest_s: float) -> None:
    canvas.text(LEFT - 8, top + BAR / 2 + 4, way.way, kind="small", anchor="end", colour=way.way)
    length = (WIDTH - LEFT - RIGHT) * way.latencies.e2e_s.mean / longest_s
    left = float(LEFT)
    for _, colour, phases in GROUPS:
        share = sum(way.phase_shares.get(phase, 0.0) for phase in phases)
        width = length * share
        if share > 0:
            canvas.rect(left, top, width, BAR, colour)
        if width > (WIDTH - LEFT - RIGHT) * LABEL_SHARE:
            middle = left + width / 2
            words = f"{share:.0%}"
            canvas.text(
                middle, top + BAR / 2 + 4, words, kind="small", anchor="middle", colour="on"
            )
        left += width
    words = f"{way.latencies.e2e_s.mean:.1f} s"
    canvas.text(left + 8, top + BAR / 2 + 4, words, kind="muted small")
