"""How the command line reaches a router: its options before the command, and the key that it shows.

    twophase --ca ca.pem status --address router:8100

The key comes from the environment variable TWOPHASE_API_KEY: arguments are seen by every user of
the machine.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from core.errors import PeerLost, TwophaseError
from core.settings.security import Tls
from twophase.client import Client

API_KEY = "TWOPHASE_API_KEY"
DEFAULT_ADDRESS = "127.0.0.1:8100"
KNOCK_S = 1.0

Address = Annotated[str, typer.Option(help="host:port of the router, or A,B of several.")]

_tls: ContextVar[Tls | None] = ContextVar("tls", default=None)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twophase {version('twophase')}")
        raise typer.Exit


def connection_options(
    ca: Annotated[
        Path | None, typer.Option(help="Speak TLS, and check the router by these authorities.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate to show, where the router asks for one.")
    ] = None,
    private_key: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    server_name: Annotated[
        str | None, typer.Option(help="Name in the router's certificate, if not its address.")
    ] = None,
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_tell_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Keep the options for the command that follows."""
    if ca is not None:
        _tls.set(Tls(ca, certificate, private_key, server_name))
    elif certificate or private_key or server_name:
        raise typer.BadParameter("--certificate, --private-key and --server-name need --ca")


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """A client of the router at `address`, or of several (A,B), as options and environment say.

    Raises:
        ConfigError: the key or a certificate cannot be used.
        TwophaseError: nobody listens at any of the addresses.
    """
    addresses = address.split(",")
    try:
        with Client(addresses, api_key=os.environ.get(API_KEY) or None, tls=_tls.get()) as client:
            yield client
    except PeerLost as error:
        obstacles = [obstacle for each in addresses if (obstacle := _obstacle(each)) is not None]
        if len(obstacles) < len(addresses):
            raise
        raise TwophaseError(
            f"no router answers at {address} ({obstacles[0]}): `twophase serve` starts one, "
            "--address names another"
        ) from error


def _obstacle(address: str) -> str | None:
    """Why no connection to the address can be opened; None if one can."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "is not host:port"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S):
            return None
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
