"""`twophase up` and `twophase down`: a cluster on a Ray cluster that runs already."""

import signal
import threading
from typing import Annotated

import typer
from rich.console import Console

from core.errors import ConfigError
from deploy.commands.cluster_file import Config, Overrides, load

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True)

RayAddress = Annotated[
    str, typer.Option("--address", help="auto, HOST:PORT of Ray's head, or ray://HOST:PORT.")
]
Name = Annotated[str, typer.Option("--name", help="Of the cluster, among others on that Ray.")]
Attach = Annotated[
    bool, typer.Option("--attach", help="Stay, and end the cluster on Ctrl-C or SIGTERM.")
]


def up(
    config: Config = None,
    overrides: Overrides = None,
    address: RayAddress = "auto",
    name: Name = "main",
    attach: Attach = False,
) -> None:
    """Start a cluster on a Ray cluster that runs already; return when it is ready."""
    from deploy.actors.joined_cluster import start_cluster, stop_cluster
    from deploy.actors.membership import joined
    from deploy.actors.name import require_cluster_name

    require_cluster_name(name)
    cluster = load(config, overrides)
    with joined(address):
        with err.status("starting"):
            router = start_cluster(name, cluster, tell=out.print)
        out.print(f"[green]ready[/]: gRPC at [bold]{router}[/], mode {cluster.mode}")
        if attach:
            _until_signal()
            with err.status("stopping"):
                stop_cluster(name)


def down(address: RayAddress = "auto", name: Name = "main") -> None:
    """End what `up` started: the router drains first, then the workers."""
    from deploy.actors.joined_cluster import stop_cluster
    from deploy.actors.membership import joined
    from deploy.actors.name import require_cluster_name

    require_cluster_name(name)
    with joined(address), err.status("stopping"):
        num_stopped = stop_cluster(name)
    if not num_stopped:
        raise ConfigError("--name", f"no cluster {name!r} runs there")
    out.print(f"{num_stopped} servers of {name} stopped")


def _until_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.set())
    stop.wait()
