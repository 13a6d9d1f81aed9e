"""`twophase scaling`: what was decided, from the file that `scaling.log` names."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from core.errors import ConfigError
from deploy import decision_log
from deploy.decision_log import Entry

LOOK_S = 0.5

scaling_app = typer.Typer(no_args_is_help=True, help="Show how pools were scaled, and why.")

Log = Annotated[Path, typer.Argument(metavar="FILE", help="The file that scaling.log names.")]


@scaling_app.command("log")
def scaling_log(
    path: Log,
    every: Annotated[bool, typer.Option("--all", help="Also ticks that changed nothing.")] = False,
    follow: Annotated[bool, typer.Option(help="Go on with what is added, until Ctrl-C.")] = False,
) -> None:
    """One sentence for each decision that changed something, and for each reload."""
    with log_errors(path):
        found = decision_log.follow(path, _pause) if follow else decision_log.entries(path)
        _show(found, every=every)


def _show(found: Iterator[tuple[int, Entry]], *, every: bool) -> None:
    out = _console()
    number, is_any_shown = 0, False
    for number, entry in found:
        if every or entry["actions"] or "reload" in entry:
            at = entry.get("at", f"{entry['now_s']:.1f} s")  # older lines have no time of day
            out.print(f"{number:6}  {at}  {entry['sentence']}")
            is_any_shown = True
    if not is_any_shown:
        out.print(f"{number} decisions, and none changed anything: --all shows them")


@scaling_app.command("explain")
def scaling_explain(
    path: Log,
    number: Annotated[int, typer.Argument(min=1, help="As `scaling log` numbers them.")],
) -> None:
    """Everything that one decision was made from."""
    with log_errors(path):
        found = dict(decision_log.entries(path))
    if number > len(found):
        raise ConfigError(str(path), f"holds {len(found)} decisions, no number {number}")
    entry = found[number]
    out = _console()
    out.print(entry.pop("sentence"))
    out.print(yaml.safe_dump(entry, sort_keys=False), end="")


@contextmanager
def log_errors(path: Path) -> Iterator[None]:
    """ConfigError in the place of what is wrong with the log that is read within."""
    try:
        yield
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is no log of decisions: {error}") from error


def _pause() -> None:
    """What is added to a file announces itself on no system alike: it is looked at in a while."""
    threading.Event().wait(LOOK_S)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)
