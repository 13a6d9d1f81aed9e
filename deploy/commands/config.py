"""`twophase config`: check a file before it is used, and its schema for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from core.config import ClusterConfig, problems_of
from core.process import EXIT_REFUSED
from core.settings.file import line_of

config_app = typer.Typer(no_args_is_help=True, help="Check configurations.")


@config_app.command("check")
def config_check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster's YAML.")],
) -> None:
    """Say what is wrong with a file, by line; exit code 2 if anything is."""
    out = Console(soft_wrap=True, highlight=False, markup=False)
    problems = problems_of(path)
    for problem in problems:
        line = _line_of(path, problem.path)
        out.print(f"{path}:{line}: {problem}" if line is not None else str(problem))
    if problems:
        raise typer.Exit(EXIT_REFUSED)
    out.print(f"{path}: nothing is wrong")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the file, by which editors complete and check it."""
    text = json.dumps(ClusterConfig.model_json_schema(), indent=2)
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


def _line_of(path: Path, key: str) -> int | None:
    """Where the key stands; None where the file cannot be read at all."""
    return None if key == str(path) else line_of(path.read_text(encoding="utf-8"), key)
