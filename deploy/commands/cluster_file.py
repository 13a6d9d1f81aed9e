"""The arguments by which commands are told a cluster's configuration."""

from pathlib import Path
from typing import Annotated

import typer

from core.config import ClusterConfig, load_config
from core.errors import ConfigError

Config = Annotated[
    str | None, typer.Argument(help="The cluster's YAML; without it every key has its default.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, keys dotted.")]


def load(
    config: str | None, overrides: list[str] | None, *, dry_run: bool = False
) -> ClusterConfig:
    """The configuration; a first argument with a '=' in it is an override, not a file.

    With dry_run, decisions about scaling are only told.
    """
    words = list(overrides or [])
    if config is not None and "=" in config:
        words.insert(0, config)
        config = None
    path = Path(config) if config is not None else None
    if dry_run:
        if load_config(path, words).scaling is None:
            raise ConfigError("scaling", "is missing: --dry-run has nothing to decide")
        words.append("scaling.dry_run=true")
    return load_config(path, words)
