"""`twophase scaling`: what was decided, from the file that `scaling.log` names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from core.errors import ConfigError

scaling_app = typer.Typer(no_args_is_help=True, help="Show how pools were scaled, and why.")

Log = Annotated[Path, typer.Argument(metavar="FILE", help="The file that scaling.log names.")]


@scaling_app.command("log")
def scaling_log(
    path: Log,
    every: Annotated[bool, typer.Option("--all", help="Also ticks that changed nothing.")] = False,
) -> None:
    """One sentence for each decision that changed something."""
    out = _console()
    for number, record in enumerate(scaling_records(path), start=1):
        if every or record["actions"]:
            out.print(f"{number:6} {record['now_s']:12.1f} s  {record['sentence']}")


@scaling_app.command("explain")
def scaling_explain(
    path: Log,
    number: Annotated[int, typer.Argument(min=1, help="As `scaling log` numbers them.")],
) -> None:
    """Everything that one decision was made from."""
    records = list(scaling_records(path))
    if number > len(records):
        raise ConfigError(str(path), f"holds {len(records)} decisions, no number {number}")
    record = records[number - 1]
    out = _console()
    out.print(record.pop("sentence"))
    out.print(yaml.safe_dump(record, sort_keys=False), end="")


def scaling_records(path: Path) -> Iterator[dict[str, Any]]:  # Any: as Record.to_json wrote them
    """Each decision that the log holds; raises ConfigError where it is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is no log of decisions: {error}") from error


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)
