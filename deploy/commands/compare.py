"""`twophase compare`: one workload on the same cores in each way of serving, and a report."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from bench.compare.crossover import Crossover
    from bench.compare.plan import ComparePlan
    from bench.compare.summary import WorkloadSummary

EXIT_BROKEN = 1
CPU_INFO = Path("/proc/cpuinfo")

_WORKLOAD = "Workload, where no plan is given"


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN.yaml|key=value",
            help="A plan, and settings: rounds, ways, chunk_tokens, workers, prefill_workers, "
            "threads, model, engine.dtype, slo.ttft_s, slo.tpot_s, slo.itl_s, crossover=null ...",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Azure CSV or Mooncake JSON lines.", rich_help_panel=_WORKLOAD),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text, one prompt a line.", rich_help_panel=_WORKLOAD)
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input", help="Tokens a prompt.", rich_help_panel=_WORKLOAD)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output", help="Tokens an answer.", rich_help_panel=_WORKLOAD)
    ] = None,
    directory: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path(
        "comparison"
    ),
) -> None:
    """Which way of serving suits a workload on this machine: measured, explained.

    Plays the same requests in the modes colocated, chunked and disaggregated,
    on as many workers and the same cores, in turns; checks that all give the
    same tokens; finds the prompt length from which on it pays to split; writes
    README.md, report.html, figures and result.json. Exit code 1: tokens differ,
    or requests failed.

    Of a workload, too, are key=value: requests_per_s (Poisson arrivals; default:
    the trace's, else 1), rate (times the trace's), divide (the trace's lengths),
    max_input_tokens, max_output_tokens, duration_s (of arrivals in a round),
    max_requests.

    twophase compare --input 1024 --output 64 requests_per_s=0.5

    twophase compare --trace code.csv divide=2 requests_per_s=0.6 rounds=3
    """
    # The rest of the command line starts without numpy and the servers.
    from bench.compare.plan import load_plan
    from bench.compare.report import Origin, write_report
    from bench.compare.run import compare as play
    from bench.compare.summary import summaries

    options = {
        "trace": trace and str(trace),
        "prompts": prompts and str(prompts),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
    }
    given: dict[str, object] = {key: value for key, value in options.items() if value is not None}
    overrides = list(words or [])
    path = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    err, out = Console(stderr=True), Console()
    played = load_plan(path, overrides, given)
    command = shlex.join(["twophase", *sys.argv[1:]])
    with _Shown(err) as shown:
        comparison = play(played, shown)
    found = summaries(comparison)
    write_report(comparison, found, Origin(command, _machine(), datetime.now(UTC)), directory)
    _print(out, played, comparison.crossover, found)
    out.print(f"the report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    is_broken = any(
        not one.tokens.is_same or any(way.num_failed for way in one.ways) for one in found
    )
    raise typer.Exit(EXIT_BROKEN if is_broken else 0)


class _Shown:
    """The run's progress on standard error: one bar for each of its stages."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def stage(self, what: str, num_steps: int) -> None:
        """The next bar; the one before has ended."""
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(what, total=num_steps)
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)

    def step(self) -> None:
        """One more."""
        assert self._task is not None
        self._progress.advance(self._task)

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


def _machine() -> str:
    cpu = platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
        cpu = next(
            (line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu
        )
    return f"{os.cpu_count()} cores ({cpu})"


def _print(
    out: Console,
    plan: "ComparePlan",
    crossover: "Crossover | None",
    found: Sequence["WorkloadSummary"],
) -> None:
    from bench.compare.verdict import MEASURES, in_short

    for summary in found:
        ways = (way.way.value for way in summary.ways)
        table = Table(summary.name, *ways, box=None, header_style="bold")
        for measure in MEASURES:
            cells = (measure.show(measure.read(way)) for way in summary.ways)
            table.add_row(measure.name, *cells)
        table.add_row("failed", *(f"{w.num_failed} of {w.num_asked}" for w in summary.ways))
        out.print(table)
        for difference in summary.tokens.differences:
            out.print(f"[red]tokens differ[/]: {escape(difference)}", highlight=False)
        for way in summary.ways:
            for failure in way.failures:
                out.print(f"[red]{way.way} failed[/]: {escape(failure)}", highlight=False)
    for line in in_short(crossover, plan.crossover, found):
        out.print(line.replace("**", "").replace("`", ""), highlight=False)
