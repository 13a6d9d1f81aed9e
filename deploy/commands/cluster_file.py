"""The arguments by which commands are told a cluster's configuration."""

from pathlib import Path
from typing import Annotated

import typer

from core.config import ClusterConfig, load_config

Config = Annotated[str | None, typer.Argument(help="The cluster's YAML.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, keys dotted.")]


def load(config: str | None, overrides: list[str] | None) -> ClusterConfig:
    """The configuration; a first argument with a '=' in it is an override, not a file."""
    words = list(overrides or [])
    if config is not None and "=" in config:
        words.insert(0, config)
        config = None
    return load_config(Path(config) if config is not None else None, words)
