"""The picture of one round per setup: each token's gap over time, with the long prompt marked."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.interference_result import Observation, numbers_of

PANEL_HEIGHT_IN, MARGINS_IN, WIDTH_IN, DPI = 1.5, 1.7, 8.5, 140
# Tokens that came in one bunch are drawn at the bottom.
LOWEST_MS = 8.0
QUIET, DISTURBED, MARK = "#7a8794", "#c8442c", "#f3d9a4"


def draw(rounds: Mapping[str, Observation], path: Path) -> None:
    """Write a PNG with one panel per setup; all panels share both axes."""
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN * len(rounds) + MARGINS_IN), dpi=DPI)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rounds), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, (name, seen) in zip(panels, rounds.items(), strict=True):
        _draw_panel(panel, name, seen)
    panels[0].set_yscale("log")
    panels[0].set_yticks([10, 100, 1000], ["10", "100", "1000"])
    panels[-1].set_xlabel("seconds since the long prompt was sent")
    figure.supylabel("gap before each token, ms", fontsize=10)
    figure.suptitle("What one long prompt (shaded) does to running streams", fontsize=12)
    figure.tight_layout(h_pad=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(panel: Axes, name: str, seen: Observation) -> None:
    sent_s, running_s = seen.disturbed
    panel.axvspan(0.0, running_s - sent_s, color=MARK, alpha=0.6, linewidth=0)
    for is_disturbed, colour in ((False, QUIET), (True, DISTURBED)):
        gaps = [
            gap
            for gap in seen.gaps()
            if gap.seconds > 0 and gap.overlaps(sent_s, running_s) is is_disturbed
        ]
        panel.scatter(
            [gap.ended_s - sent_s for gap in gaps],
            [max(gap.seconds * 1e3, LOWEST_MS) for gap in gaps],
            s=5,
            color=colour,
            alpha=0.7,
            linewidths=0,
        )
    found = numbers_of(seen)
    panel.set_title(
        f"{name}: longest gap {found.prefill_max_ms:.0f} ms, quiet p50 {found.quiet_p50_ms:.0f} ms,"
        f" first token of the long prompt after {found.ttft_s:.2f} s",
        fontsize=9,
        loc="left",
    )
    panel.grid(axis="y", linewidth=0.4, alpha=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
