"""A sheet of SVG to draw on, two kinds of scales, and the colours of both themes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_LIGHT = {
    "face": "#ffffff", "panel": "#f6f7f9", "ink": "#1d2733", "muted": "#66727f",
    "grid": "#dfe4e9", "colocated": "#c2541b", "chunked": "#7450c8", "disaggregated": "#0b8478",
    "prefill": "#e2903f", "decode": "#3d7cc0", "quiet": "#8b9aaa", "hit": "#cc3a2b",
    "mark": "#a87900", "other": "#b7a4d6", "on": "#16202b",
}  # fmt: skip
_DARK = {
    "face": "#10151b", "panel": "#171e26", "ink": "#e5e9ee", "muted": "#98a4b1",
    "grid": "#2a343f", "colocated": "#f08a4b", "chunked": "#a98bf5", "disaggregated": "#35c4b3",
    "prefill": "#e79a4e", "decode": "#5b9be0", "quiet": "#6f8093", "hit": "#ff6b57",
    "mark": "#e5b93c", "other": "#a791d0", "on": "#10151b",
}  # fmt: skip

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


# For a page that holds pictures, and for a picture that is a file of its own.
THEME = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)
_TEXT = (
    f".figure text{{font:12px {FONT};fill:var(--ink)}}"
    ".figure .muted{fill:var(--muted)}.figure .small{font-size:11px}"
    ".figure .title{font-weight:600;font-size:13px}"
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`; beyond them they are cut."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.0
        return self.start + share * (self.end - self.start)

    def ticks(self, num: int = 6) -> list[float]:
        """Round values in it; of a log scale the powers of ten."""
        if self.is_log:
            exponents = range(
                math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1
            )
            return [10.0**exponent for exponent in exponents]
        rough = (self.high - self.low) / num
        size = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= rough)
        first = math.ceil(self.low / step)
        count = int(self.high / step + 1e-9) - first + 1
        return [(first + index) * step for index in range(count)]


class Canvas:
    """Shapes in the order in which they were drawn."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width = width
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1.0
    ) -> None:
        """A filled rectangle; colour is a variable's name."""
        shade = f' fill-opacity="{opacity:.2g}"' if opacity < 1 else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" '
            f'style="fill:var(--{colour})"{shade}/>'
        )

    def line(
        self,
        ends: tuple[float, float, float, float],
        colour: str,
        *,
        width: float = 1,
        dash: str = "",
    ) -> None:
        """A straight line from (x, y) to (x, y)."""
        x1, y1, x2, y2 = ends
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" style="stroke:var(--{colour})" '
            f'stroke-width="{width:g}" fill="none"{dashes}/>'
        )

    def polyline(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A line through points, each with a dot."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(
            f'<path d="M{path}" style="stroke:var(--{colour})" stroke-width="2" fill="none" '
            'stroke-linejoin="round"/>'
        )
        self.dots(points, colour, size=7)

    def dots(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        *,
        size: float,
        opacity: float = 1.0,
    ) -> None:
        """Round dots, all in one path."""
        if not points:
            return
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        self._parts.append(
            f'<path d="{path}" style="stroke:var(--{colour})" stroke-width="{size:g}" '
            f'stroke-linecap="round" stroke-opacity="{opacity:g}" fill="none"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        kind: str = "",
        anchor: str = "start",
        colour: str = "",
    ) -> None:
        """Words; kind is of "muted", "small" and "title"."""
        style = f' style="fill:var(--{colour})"' if colour else ""
        classes = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{style}>'
            f"{escape(words)}</text>"
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Squares with words, (colour, words) each, from left to right."""
        for colour, words in entries:
            self.rect(x, y - 9, 10, 10, colour)
            self.text(x + 15, y, words, kind="muted small")
            x += 15 + 6.1 * len(words) + 18

    def inline(self) -> str:
        """For a page that has THEME."""
        return (
            f'<svg class="figure" role="img" aria-label="{escape(self._label)}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" xmlns="http://www.w3.org/2000/svg">'
            f"<style>{_TEXT}</style>{''.join(self._parts)}</svg>"
        )

    def file(self) -> str:
        """A file of its own, with both themes in it."""
        face = f'<rect width="{self.width:g}" height="{self.height:g}" style="fill:var(--face)"/>'
        size = f'width="{self.width:g}" height="{self.height:g}" '
        svg = self.inline().replace("<svg ", f"<svg {size}", 1)
        svg = svg.replace("<style>", f"<style>{THEME}", 1)
        return svg.replace("</style>", f"</style>{face}", 1) + "\n"
