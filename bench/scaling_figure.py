"""The picture of bench-scaling: workers of both pools over time, a panel for each round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANEL_HEIGHT_IN, MARGINS_IN, WIDTH_IN, DPI = 2.0, 1.2, 8.5, 140
COLOURS = {"prefill": "#c8442c", "decode": "#2c6fa8"}
WAITING, FIRST_HALF = "#9aa5af", "#f3ead4"

Records = Sequence[Mapping[str, Any]]  # Any: as Record.to_json writes them


def draw(rounds: Mapping[str, tuple[Records, float]], path: Path) -> None:
    """Write a PNG; each round is its decisions, and when the load turned."""
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN * len(rounds) + MARGINS_IN), dpi=DPI)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rounds), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, (records, turned_s)) in zip(panels, rounds.items(), strict=True):
        _draw_panel(panel, name, records, turned_s)
    panels[-1].set_xlabel("seconds; shaded: long prompts and short answers, then the other way")
    figure.suptitle("Workers that serve, and requests that wait for one", fontsize=12)
    figure.tight_layout(h_pad=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(panel: Axes, name: str, records: Records, turned_s: float) -> None:
    start_s = records[0]["now_s"]
    times_s = [record["now_s"] - start_s for record in records]
    line = panel.twinx()  # lies behind the panel, and so does the shade
    line.axvspan(0.0, turned_s - start_s, color=FIRST_HALF, linewidth=0)
    waiting = [_num_waiting(record) for record in records]
    line.fill_between(times_s, waiting, color=WAITING, alpha=0.4, linewidth=0, step="post")
    line.set_ylabel("requests that wait", fontsize=8, color="#5b6670")
    line.set_ylim(0, max(10, *waiting) * 1.1)
    for offset, (role, colour) in zip((0.03, -0.03), COLOURS.items(), strict=True):
        pools = [next(p for p in record["pools"] if p["role"] == role) for record in records]
        serving = [pool["view"]["num_serving"] + offset for pool in pools]
        panel.step(times_s, serving, where="post", color=colour, linewidth=2, label=role)
    panel.set_zorder(line.get_zorder() + 1)
    panel.patch.set_visible(False)
    panel.set_ylim(-0.1, 2.5)
    panel.set_yticks([0, 1, 2])
    panel.set_ylabel("workers", fontsize=8)
    panel.set_title(name, fontsize=9, loc="left")
    panel.legend(loc="upper left", fontsize=8, frameon=False, ncols=2)
    for axes in (panel, line):
        axes.spines["top"].set_visible(False)


def _num_waiting(record: Mapping[str, Any]) -> int:
    """Requests in the router's line, and in those of the workers."""
    at_workers = sum(pool["view"]["num_waiting"] for pool in record["pools"])
    return int(record["demand"]["num_in_line"] + at_workers)
