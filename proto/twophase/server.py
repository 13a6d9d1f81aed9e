"""A gRPC server that says what is wrong when it cannot listen, and stops in order."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from core.errors import ConfigError, InvalidRequest, TwophaseError
from twophase.credentials import Access
from twophase.errors import clipped, status_code, trailer
from twophase.guard import Guard
from twophase.peer import MAX_MESSAGE_BYTES, SERVER_OPTIONS

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]  # Any: each method has its own messages
else:
    Context = grpc.aio.ServicerContext


async def abort(context: Context, error: TwophaseError) -> None:
    """End the call of `context` with `error`; does not return."""
    await context.abort(status_code(error), clipped(str(error)), trailer(error))


Message = TypeVar("Message")
Value = TypeVar("Value")


async def readable(
    messages: AsyncIterator[Message], parse: Callable[[Message], Value]
) -> AsyncIterator[Value]:
    """What the messages of a stream say.

    Raises:
        InvalidRequest: one of them cannot be read.
    """
    try:
        async for message in messages:
            yield parse(message)
    except (ValueError, KeyError, DecodeError) as error:
        raise InvalidRequest("message", "unreadable", str(error)) from error


async def run_stream(context: Context, *parts: Coroutine[Any, Any, None]) -> None:
    """Run the parts of a stream's handler until the first one ends; then cancel the others.

    A TwophaseError of any part ends the call with its status, and a client that has hung up ends
    it quietly; other errors are raised.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, TwophaseError):
            await abort(context, end)
        if isinstance(end, Exception) and not isinstance(end, grpc.aio.BaseError):
            raise end


class Server:
    """One listening server; add servicers to `grpc`, then `start`."""

    def __init__(
        self, listen: str, access: Access, *, stop_grace_s: float, max_message_bytes: int
    ) -> None:
        options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes))
        self.grpc = grpc.aio.server(options=options, interceptors=(*access.interceptors, Guard()))
        self._listen = listen
        self._access = access
        self._stop_grace_s = stop_grace_s

    async def start(self) -> str:
        """Listen; returns host:port with the real port.

        Raises:
            ConfigError: the address cannot be bound, mostly because it is in use, or its
                certificates cannot be used.
        """
        try:
            port = self._access.add_port(self.grpc, self._listen)
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
async def running_server(
    listen: str,
    access: Access,
    *,
    stop_grace_s: float,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncIterator[Server]:
    """A server that is stopped at once if the context is left before `stop`."""
    server = Server(listen, access, stop_grace_s=stop_grace_s, max_message_bytes=max_message_bytes)
    try:
        yield server
    finally:
        await server.grpc.stop(None)
