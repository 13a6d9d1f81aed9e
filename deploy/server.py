"""One worker or the router, run in a thread of whatever process holds it.

A Ray actor is such a process (`deploy.pool`). Which server runs follows from the type of the
configuration. Modules are imported when they are needed: a driver and a router carry no torch.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from core.process import cause_of, start_logging
from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from router.config import FrontDoorConfig

ServerConfig = PrefillWorkerConfig | DecodeWorkerConfig | FrontDoorConfig
Serve = Callable[[asyncio.Event, Callable[[str], None]], Awaitable[None]]


def server_of(config: ServerConfig) -> Serve:
    """What runs the server that `config` describes, until its event is set."""
    match config:
        case PrefillWorkerConfig():
            from prefill_worker.server import serve as serve_prefill

            return lambda stop, tell: serve_prefill(config, stop=stop, on_ready=tell)
        case DecodeWorkerConfig():
            from decode_worker.server import serve as serve_decode

            return lambda stop, tell: serve_decode(config, stop=stop, on_ready=tell)
        case FrontDoorConfig():
            from router.server import serve as serve_router

            return lambda stop, tell: serve_router(config, stop=stop, on_listening=tell)


class Server:
    """A server in its own thread and event loop.

    It has no async method: Ray would then run all of them in one loop, where a method that waits
    keeps the others out.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._is_started = threading.Lock()
        self._address: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> str:
        """host:port, once the server listens (a worker: once it is warm).

        Raises:
            ModelError, ConfigError: it cannot start.

        Contract: idempotent; may block for the time that loading a model takes.
        """
        if self._is_started.acquire(blocking=False):
            start_logging()
            threading.Thread(target=self._run, name="server", daemon=True).start()
        return self._address.result()

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the server ends within `timeout_s`; raises what ended it."""
        try:
            self._ended.result(timeout_s)
        except TimeoutError:
            if not self._ended.done():
                return False
            raise
        return True

    def stop(self) -> None:
        """Stop in order; returns once the server has ended. Contract: idempotent."""
        if self._loop is not None and self._stop is not None and not self._ended.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._address.done() and self._address.exception() is None:
            self._ended.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # root of the thread: whoever waits gets the error
            waited_for = self._ended if self._address.done() else self._address
            waited_for.set_exception(cause_of(error))
        else:
            self._ended.set_result(None)

    def _serve(self) -> Coroutine[Any, Any, None]:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            await server_of(self._config)(self._stop, self._address.set_result)

        return serve()
