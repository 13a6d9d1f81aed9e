"""The crossover: running streams' gaps and the prompt's first token, over the prompt's length."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.compare.crossover import Beside, Crossover
from bench.compare.figures.canvas import Canvas, Scale

WIDTH, HEIGHT, TOP, BOTTOM, LEFT, BETWEEN, LABELS = 960, 300, 44, 44, 58, 56, 104
LABEL_HEIGHT = 15


def draw_crossover(crossover: Crossover) -> Canvas:
    """Two panels, one line for each way."""
    canvas = Canvas(WIDTH, HEIGHT, "crossover: gaps and first token over the prompt's length")
    half = (WIDTH - LEFT - BETWEEN) / 2
    gaps = _Panel(canvas, crossover, LEFT, LEFT + half - LABELS, lambda point: point.itl_p99_s)
    gaps.draw("p99 of running streams' gaps while the prompt is read", crossover.target_s)
    left = LEFT + half + BETWEEN
    first = _Panel(canvas, crossover, left, left + half - LABELS, lambda point: point.ttft_s)
    first.draw("first token of the prompt", None)
    return canvas


@dataclass(frozen=True, slots=True)
class _Panel:
    canvas: Canvas
    crossover: Crossover
    left: float
    right: float
    value: Callable[[Beside], float]

    def draw(self, title: str, target: float | None) -> None:
        """Lines with their names at the end; the target, if there is one, as a dotted line."""
        canvas, ends = self.canvas, {}
        x, y = self._scales([] if target is None else [target])
        self._frame(title, x, y)
        if target is not None:
            canvas.line((self.left, y(target), self.right, y(target)), "ink", dash="2 4")
            ends[f"target {target * 1e3:.0f} ms"] = ("ink", y(target))
        for way, points in self.crossover.points.items():
            line = [(x(point.num_prompt_tokens), y(self.value(point))) for point in points]
            canvas.polyline(line, way)
            ends[way.value] = (way.value, line[-1][1])
        last = float("-inf")
        for name, (colour, at) in sorted(ends.items(), key=lambda end: end[1][1]):
            last = max(at, last + LABEL_HEIGHT)
            canvas.text(self.right + 6, last + 4, name, kind="small", colour=colour)

    def _scales(self, also: list[float]) -> tuple[Scale, Scale]:
        points = [point for own in self.crossover.points.values() for point in own]
        values = [*map(self.value, points), *also]
        lengths = self.crossover.lengths
        return (
            Scale(lengths[0] * 0.8, lengths[-1] * 1.1, self.left, self.right, is_log=True),
            Scale(min(values) / 1.6, max(values) * 1.6, HEIGHT - BOTTOM, TOP, is_log=True),
        )

    def _frame(self, title: str, x: Scale, y: Scale) -> None:
        canvas = self.canvas
        canvas.rect(self.left, TOP, self.right - self.left, HEIGHT - BOTTOM - TOP, "panel")
        canvas.text(self.left, TOP - 14, title, kind="title")
        for tick in y.ticks():
            canvas.line((self.left, y(tick), self.right, y(tick)), "grid")
            words = f"{tick * 1e3:g} ms" if tick < 1 else f"{tick:g} s"
            canvas.text(self.left - 7, y(tick) + 4, words, kind="muted small", anchor="end")
        for length in self.crossover.lengths:
            at, words = x(length), str(length)
            canvas.line((at, HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 4), "muted")
            canvas.text(at, HEIGHT - 26, words, kind="muted small", anchor="middle")
        words = "tokens of the prompt"
        canvas.text(self.right, HEIGHT - 8, words, kind="muted small", anchor="end")
