"""A run for people: figures, sizes over time, and the decisions in words."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.simulate.cluster import Run
from bench.simulate.outcome import MAX_SLOWDOWN, Outcome, Slo
from core.errors import ConfigError
from deploy.autoscaler.record import Record

WIDTH = 72
_LEVELS = " " + "".join(chr(0x2581 + eighth) for eighth in range(8))


def print_run(run: Run, outcome: Outcome, slo: Slo, records: Sequence[Record]) -> None:
    """The figures, the sizes as two lines, and each tick that changed something."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(_figures(outcome, slo, run.ended_s))
    for failure, number in sorted(outcome.failures.items(), key=lambda pair: -pair[1])[:5]:
        out.print(f"{number} requests were not served: {failure}", markup=False)
    for name in ("prefill", "decode"):
        sizes = [getattr(pair, name) for _, pair in run.sizes]
        least, most = min(sizes), max(sizes)
        told = f" always {most}" if least == most else f" {least} to {most} workers"
        line = sparkline(sizes, min(WIDTH, max(out.width - 8 - len(told), 8)))
        out.print(f"{name:8}{line}{told}", markup=False)
    for record in records:
        if record.is_change:
            out.print(f"{record.now_s:8.0f} s  {record.sentence}", markup=False)


def print_side_by_side(outcomes: Mapping[str, Outcome], slo: Slo) -> None:
    """The figures of several runs of one load, a column each."""
    table = Table("figure", *outcomes, box=None)
    runs = list(outcomes.values())

    def add(name: str, cell: Callable[[Outcome], str]) -> None:
        table.add_row(name, *map(cell, runs))

    add("requests, not served", lambda run: f"{run.num_requests}, {run.num_failed}")
    add("first token, p50 and p95", lambda run: _pair(run.ttft_s))
    add("gap between tokens, p50 and p95", lambda run: _pair(run.tpot_s))
    add("wait in line, p50 and p95", lambda run: _pair(run.line_s))
    add(f"answers {_targets(slo)}", lambda run: f"{run.attainment:.1%}")
    add("goodput", lambda run: f"{run.goodput_per_s:.2f} /s")
    add("most workers", lambda run: f"{run.peak.prefill} prefill, {run.peak.decode} decode")
    add("worker-hours, turns", lambda run: f"{run.worker_hours:.2f}, {run.num_turns}")
    Console(highlight=False, soft_wrap=True).print(table)


def _pair(seconds: tuple[float, float]) -> str:
    return f"{seconds[0]:.3f} s, {seconds[1]:.3f} s"


def _targets(slo: Slo) -> str:
    return f"within {slo.ttft_s:g} s + {MAX_SLOWDOWN:g}x reading, {slo.tpot_s * 1e3:g} ms"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The values as a line of bars, each the most of its span; the highest is full."""
    num_cells = min(width, len(values))
    most = max(values) or 1
    cells = []
    for cell in range(num_cells):
        start, end = (len(values) * edge // num_cells for edge in (cell, cell + 1))
        height = max(values[start : max(end, start + 1)]) / most
        cells.append(_LEVELS[round(height * (len(_LEVELS) - 1))])
    return "".join(cells)


def require_matplotlib() -> None:
    """Raise ConfigError where figures cannot be drawn: better before a long run than after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--figure", "needs matplotlib: `pip install matplotlib`")


def draw(run: Run, path: Path) -> None:
    """Write a PNG: workers of both pools, and requests that were inside, over time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.0), dpi=140)
    FigureCanvasAgg(figure)
    sizes, inside = figure.subplots(2, 1, sharex=True)
    times = [when_s / 60 for when_s, _ in run.sizes]
    sizes.step(times, [pair.prefill for _, pair in run.sizes], where="post", label="prefill")
    sizes.step(times, [pair.decode for _, pair in run.sizes], where="post", label="decode")
    sizes.set_ylabel("workers")
    sizes.set_ylim(bottom=0)
    sizes.legend()
    changes = sorted(
        [(trip.arrival.at_s / 60, 1) for trip in run.trips]
        + [(trip.ended_s / 60, -1) for trip in run.trips if trip.ended_s is not None]
    )
    count, counts = 0, []
    for _, change in changes:
        count += change
        counts.append(count)
    inside.plot([when for when, _ in changes], counts, color="#7a8794")
    inside.set_ylabel("requests inside")
    inside.set_xlabel("minutes")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _figures(outcome: Outcome, slo: Slo, seconds: float) -> Table:
    table = Table("", "p50", "p95", box=None, pad_edge=False)
    for name, (p50, p95) in (
        ("first token", outcome.ttft_s),
        ("gap between tokens", outcome.tpot_s),
        ("wait in line", outcome.line_s),
    ):
        table.add_row(name, f"{p50:.3f} s", f"{p95:.3f} s")
    table.add_row("requests, not served", str(outcome.num_requests), str(outcome.num_failed))
    table.add_row(f"answers {_targets(slo)}", f"{outcome.attainment:.1%}", "")
    table.add_row("goodput", f"{outcome.goodput_per_s:.2f} /s", f"over {seconds / 60:.1f} min")
    if outcome.num_lost_workers:
        numbers = (str(outcome.num_lost_workers), str(outcome.num_resumed))
        table.add_row("workers lost, requests resumed", *numbers)
    table.add_row("worker-hours, turns", f"{outcome.worker_hours:.2f}", str(outcome.num_turns))
    return table
