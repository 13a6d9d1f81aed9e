"""What `twophase chaos` shows: each fault as it comes, each stream in a table, and a verdict."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.config import ClusterConfig
from core.errors import ConfigError
from deploy.chaos.load import Stream, kind_of
from deploy.chaos.run import Outcome, run_chaos

EXIT_BROKEN = 1


def chaos_run(config: ClusterConfig, out: Console) -> int:
    """Run and report; the exit code: 0 if every stream was right and nothing was left.

    Raises:
        ConfigError: faults are not enabled.
        TwophaseError: the cluster does not start.
    """
    if not config.chaos.enabled:
        raise ConfigError("chaos.enabled", "is false: faults are injected only where it is true")
    outcome = run_chaos(config, lambda line: out.print(line, style="dim", highlight=False))
    out.print(_table(outcome))
    for line in _verdict(outcome):
        out.print(line, highlight=False)
    return 0 if outcome.is_clean else EXIT_BROKEN


def _table(outcome: Outcome) -> Table:
    table = Table("stream", "kind", "tokens", "attempts", "outcome", "faults met", box=None)
    for stream in outcome.streams:
        table.add_row(
            str(stream.number),
            kind_of(stream.number),
            str(len(stream.token_ids)),
            str(len(stream.failures) + 1),
            _outcome(outcome, stream),
            escape("; ".join(stream.failures)),
        )
    return table


def _outcome(outcome: Outcome, stream: Stream) -> str:
    if stream.error is not None:
        return f"[red]failed: {escape(str(stream.error))}[/]"
    index = stream.first_difference(outcome.expected[stream.number])
    return "[green]equal[/]" if index is None else f"[red]differs from token {index} on[/]"


def _verdict(outcome: Outcome) -> list[str]:
    num_hit = sum(bool(stream.failures) for stream in outcome.streams)
    lines = [
        f"{len(outcome.streams)} streams, {num_hit} of them met faults, {outcome.num_wrong} wrong; "
        f"{len(outcome.faults)} faults; a router grew by {outcome.growth_bytes / 1e6:.1f} MB"
    ]
    if outcome.left:
        lines.append(f"[red]left: {escape(str(outcome.left))}[/]")
    if outcome.leaked:
        lines.append(f"[red]processes that did not end: {outcome.leaked}[/]")
    verdict = "[green]nothing was broken[/]" if outcome.is_clean else "[red]promises were broken[/]"
    return [*lines, verdict]
