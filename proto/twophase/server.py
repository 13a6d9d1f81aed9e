"""A gRPC server that says what is wrong when it cannot listen, and stops in order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from core.errors import ConfigError, TwophaseError
from twophase.errors import clipped, status_code, trailer
from twophase.peer import SERVER_OPTIONS

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]  # Any: each method has its own messages
else:
    Context = grpc.aio.ServicerContext


async def abort(context: Context, error: TwophaseError) -> None:
    """End the call of `context` with `error`; does not return."""
    await context.abort(status_code(error), clipped(str(error)), trailer(error))


class Server:
    """One listening server; add servicers to `grpc`, then `start`."""

    def __init__(self, listen: str, *, stop_grace_s: float) -> None:
        self.grpc = grpc.aio.server(options=SERVER_OPTIONS)
        self._listen = listen
        self._stop_grace_s = stop_grace_s

    async def start(self) -> str:
        """Listen; returns host:port with the real port.

        Raises:
            ConfigError: the address cannot be bound, mostly because it is in use.
        """
        try:
            port = self.grpc.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise ConfigError(
                "listen", f"{self._listen} cannot be bound: the port is in use or not ours"
            ) from error
        await self.grpc.start()
        return f"{self._listen.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Take no new calls, let running ones end within the grace, then cancel them."""
        await self.grpc.stop(self._stop_grace_s)


@asynccontextmanager
async def running_server(listen: str, *, stop_grace_s: float) -> AsyncIterator[Server]:
    """A server that is stopped at once if the context is left before `stop`."""
    server = Server(listen, stop_grace_s=stop_grace_s)
    try:
        yield server
    finally:
        await server.grpc.stop(None)
