"""Listens: uvicorn in the router's event loop, with a bound on everything that a client may hold.

what a client may do            bound
open connections                MAX_CONNECTIONS; more are closed at once
send a head, or nothing         HEAD_BYTES, HEAD_TIMEOUT_S
stay idle between requests      KEEP_ALIVE_S
read slowly                     the stream pauses when SEND_BUFFER_BYTES and uvicorn's buffer are
                                full, and is cut after STALL_TIMEOUT_S without room; tokens of a
                                paused request wait as ids, at most its max_tokens

Stopping goes in uvicorn's order: no new connections, idle ones close, running requests end within
the grace, what is left is cancelled and told so. Knows no routes.
"""

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from core.errors import ConfigError
from core.settings.security import Tls
from router.http.errors import Problem
from router.http.replies import dumped
from twophase.credentials import server_context

MAX_CONNECTIONS = 4096
HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 30
STALL_TIMEOUT_S = 30.0
SEND_BUFFER_BYTES = 128 << 10
# For requests to say that they were cancelled.
LAST_WORD_S = 1.0


class HttpServer:
    """One listening server, or none where port is None: `bound` around `serve`, then `stop`."""

    def __init__(
        self, app: Any, *, host: str, port: int | None, grace_s: float, tls: Tls | None = None
    ) -> None:
        """Prepare to serve `app` (Any: the ASGI type of whatever framework).

        Raises:
            ConfigError: certificates cannot be read or used.
        """
        self._host, self._port = host, port
        context = server_context(tls) if tls is not None else None
        self._socket: socket.socket | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(grace_s),
                h11_max_incomplete_event_size=HEAD_BYTES,
                ssl_context_factory=None if context is None else lambda config, default: context,
            )
        )

    @contextmanager
    def bound(self) -> Iterator[str]:
        """Hold the port; yields host:port, empty without one. Connections wait for `serve`.

        Raises:
            ConfigError: the address cannot be bound, mostly because it is in use.
        """
        if self._port is None:
            yield ""
            return
        with _listening(self._host, self._port) as self._socket:
            yield f"{self._host}:{self._socket.getsockname()[1]}"

    async def serve(self) -> None:
        """Serve until `stop`, then drain; returns when no task of a request is left."""
        if self._socket is None:
            return
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await self._server.end()

    def stop(self) -> None:
        """Have `serve` stop accepting, let requests end within the grace, and return."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server in a process that handles its own signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield

    async def end(self) -> None:
        """Close whatever is still open, and see every request's task end."""
        for listener in getattr(self, "servers", ()):
            listener.close()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORD_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks:  # no client can hold them any more
            await asyncio.wait(tasks)


class Connection(H11Protocol):
    """uvicorn's connection, with timers for clients that send or read too slowly."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, or close it when there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, but not for ever."""
        super().on_response_complete()
        self._expect_head()

    def pause_writing(self) -> None:
        """The client does not keep up: its stream waits, for a while."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client caught up."""
        _cancel(self._stall_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Tell that what came is not HTTP, in the form of every other error."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = dumped(dict(Problem(400, msg, "invalid_request_error").body))
        head = h11.Response(
            status_code=HTTPStatus.BAD_REQUEST,
            headers=[
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ],
            reason=HTTPStatus.BAD_REQUEST.phrase,
        )
        for event in (head, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end_if_no_request)

    def _end_if_no_request(self) -> None:
        """A head that drips in, or the rest of a body that was refused, is waited for no longer."""
        if self.timeout_keep_alive_task is not None:
            self._expect_head()  # idle, and closed when that takes too long
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        problem = f"{host}:{port} cannot be bound: {error.strerror or error}"
        raise ConfigError("router.http_port", problem) from error
    with listener:
        # Accepted connections inherit it; without it the kernel may hold megabytes for each.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        yield listener
