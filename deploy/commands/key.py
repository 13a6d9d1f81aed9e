"""`twophase key`: API keys."""

from typing import Annotated

import typer
from rich.console import Console

from router.keys import new_key

key_app = typer.Typer(no_args_is_help=True, help="Make API keys.")


@key_app.command("new")
def key_new(
    owner: Annotated[str, typer.Argument(help="Whose it is; kept beside the hash.")] = "",
) -> None:
    """Print a new key, which is kept nowhere, and the line for the router's file of keys."""
    key, line = new_key(" ".join(owner.split()))
    out = Console()
    out.print(f"key:  {key}", soft_wrap=True, highlight=False, markup=False)
    out.print(f"line: {line}", soft_wrap=True, highlight=False, markup=False)


@key_app.callback()
def _group() -> None:
    """Make API keys."""
