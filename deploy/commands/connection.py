"""How the command line reaches a router: its options before the command, and the key that it shows.

    twophase --ca ca.pem status --address router:8100

The key comes from the environment variable TWOPHASE_API_KEY: arguments are seen by every user of
the machine.
"""

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from core.settings.security import Tls
from twophase.client import Client

API_KEY = "TWOPHASE_API_KEY"
DEFAULT_ADDRESS = "127.0.0.1:8100"

Address = Annotated[str, typer.Option(help="host:port of the router, or A,B of several.")]

_tls: ContextVar[Tls | None] = ContextVar("tls", default=None)


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
) -> None:
    """Keep the options for the command that follows."""
    if ca is not None:
        _tls.set(Tls(ca, certificate, private_key, server_name))
    elif certificate or private_key or server_name:
        raise typer.BadParameter("--certificate, --private-key and --server-name need --ca")


def connect(address: str) -> Client:
    """A client of the router at `address`, or of several (A,B), as options and environment say.

    Raises:
        ConfigError: the key or a certificate cannot be used.
    """
    return Client(address.split(","), api_key=os.environ.get(API_KEY) or None, tls=_tls.get())
