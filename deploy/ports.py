"""Addresses that a server and those after it listen on.

A worker that is started again listens where the one before it did, so that every router that was
told its address finds it, whoever told it. The address is held by a socket that does not listen:
the system gives it to nobody else meanwhile, also while no worker lives. Where the system allows
no second socket on it (not Linux), nothing holds it.
"""

import socket
import sys
from contextlib import ExitStack

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
