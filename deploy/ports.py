"""Addresses that a server and those after it listen on.

A worker that is started again listens where the one before it did, so that every router that was
told its address finds it, whoever told it. The address is held by a socket that does not listen:
the system gives it to nobody else meanwhile, also while no worker lives. Where the system allows
no second socket on it (not Linux), nothing holds it.
"""

import errno
import socket
import sys
from contextlib import ExitStack

from core.errors import ConfigError
from core.settings.router import RouterConfig

LOOPBACK = "127.0.0.1"


def reserved_address(stack: ExitStack) -> str:
    """host:port on loopback that nobody else is given until `stack` is closed."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, 0))
    address = f"{LOOPBACK}:{holder.getsockname()[1]}"
    if sys.platform == "linux":
        stack.callback(holder.close)
    else:
        holder.close()
    return address


def require_free(router: RouterConfig) -> None:
    """Refuse ports of the router that others listen at, before anything is started for it.

    Raises:
        ConfigError: with the key of the port.
    """
    for key, port in (("port", router.port), ("http_port", router.http_port)):
        if not port:
            continue
        try:
            socket.create_server((router.host, port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                continue  # the router says so itself, if it is one
            raise ConfigError(
                f"router.{key}",
                f"{router.host}:{port} cannot be listened at ({error.strerror}): another "
                "deployment may be there, and 0 takes a free port",
            ) from error
