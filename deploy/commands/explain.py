"""`twophase explain` and `twophase diagnose`: which phase was slow, and why, in words and a bar.

The conclusions are drawn at the router (`core.diagnosis`), which remembers the requests that ended
lately.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.completion import Completion
from core.finding import Finding
from deploy.commands.connection import DEFAULT_ADDRESS, Address, connect
from deploy.commands.phase_bar import duration, phase_bar, phase_legend, summary
from deploy.commands.request_id import AskedId, found

out = Console()


def explain(
    request_id: AskedId,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Tell which phase of a request that ended was slow, and why."""
    with connect(address) as client:
        explained = found(client.admin.explain, request_id)
    completion = explained.completion
    out.print(
        f"request {escape(completion.request_id)} ended {duration(explained.age_s)} ago "
        f"({completion.finish_reason}) after {duration(completion.phases.total_s)}",
        highlight=False,
    )
    out.print(phase_bar(completion).append("  ").append_text(phase_legend(completion)))
    out.print(summary(completion), style="dim", highlight=False)
    for finding in explained.findings:
        _print_finding(finding)
    if not explained.findings:
        out.print(f"nothing stood out: {_most_of(completion)}", style="green", highlight=False)


def diagnose(
    address: Address = DEFAULT_ADDRESS,
    minutes: Annotated[float, typer.Option(help="Look at so many last minutes.", min=0.1)] = 10.0,
) -> None:
    """Tell which phases were slow in the requests that ended lately, and why."""
    with connect(address) as client:
        diagnosis = client.admin.diagnose(minutes * 60)
    num = diagnosis.num_requests
    requests = "1 request" if num == 1 else f"{num} requests"
    out.print(f"{requests} ended well in the last {minutes:g} minutes")
    if not diagnosis.num_requests:
        return
    table = Table("phase", box=None)
    for column in ("p50", "p95", "max"):
        table.add_column(column, justify="right")
    for spread in diagnosis.phases:
        seconds = (spread.p50_s, spread.p95_s, spread.max_s)
        table.add_row(spread.phase.replace("_", " "), *map(duration, seconds))
    out.print(table)
    for trouble in diagnosis.troubles:
        num, phase = trouble.num_requests, trouble.worst.phase.replace("_", " ")
        out.print(
            f"[bold red]{phase}[/] was slow in {num} of them, {duration(trouble.seconds)} in all; "
            f"worst in {escape(trouble.worst_request_id)}:",
            highlight=False,
        )
        _print_finding(trouble.worst)
    if not diagnosis.troubles:
        out.print("nothing stood out", style="green")


def _print_finding(finding: Finding) -> None:
    usual = f", usually {duration(finding.usual_s)}" if finding.usual_s is not None else ""
    phase = finding.phase.replace("_", " ")
    out.print(
        f"[red]{finding.symptom}[/]: [bold]{phase}[/] took {duration(finding.seconds)}{usual}",
        highlight=False,
    )
    out.print(f"  {escape(finding.evidence)}", highlight=False, soft_wrap=True)
    out.print(f"  {escape(finding.advice)}", style="dim", highlight=False, soft_wrap=True)


def _most_of(completion: Completion) -> str:
    phase, seconds = max(completion.phases.items(), key=lambda item: item[1])
    whole = duration(completion.phases.total_s)
    return f"{duration(seconds)} of {whole} went to {phase.replace('_', ' ')}"
