"""What a client may hold of the HTTP server, and how the server stops; over loopback."""

import asyncio
import contextlib
import json
import socket

import pytest

from core.errors import ConfigError
from router.http import server as server_module
from router.http.server import HttpServer

SOON_S = 5.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """An ASGI application that answers as the test lets it, and notes what became of its calls."""

    def __init__(self):
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.started = asyncio.Event()
        self.gone = asyncio.Event()
        self.num_sent = 0
        self.chunk = b"token"
        self.num_chunks = 1

    async def __call__(self, scope, receive, send):
        self.started.set()
        watching = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.num_chunks):
                await self._send(send, self.chunk)
                self.num_sent += 1
                await asyncio.sleep(0)
                if self.gone.is_set():
                    return
            await self.may_end.wait()
            await self._send(send, b"end", more_body=False)
        except asyncio.CancelledError:
            await self._send(send, b"cut", more_body=False)
        finally:
            watching.cancel()

    async def _send(self, send, body, *, more_body=True):
        await send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def _watch(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@pytest.fixture
def app():
    return App()


@pytest.fixture
async def serve(app):
    """Starts one server for `app`; it is stopped with the test."""
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:

        def start(grace_s=1.0):
            server = HttpServer(app, host="127.0.0.1", port=0, grace_s=grace_s)
            port = int(stack.enter_context(server.bound()).rpartition(":")[2])
            task = tasks.create_task(server.serve())
            stack.push_async_callback(asyncio.wait, (task,), timeout=SOON_S)
            stack.callback(server.stop)
            return server, port, task

        yield start


@contextlib.asynccontextmanager
async def connected(port, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def all_of(reader):
    async with asyncio.timeout(SOON_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b"reset"


class TestListening:
    def test_a_port_in_use_is_refused_by_its_key(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = HttpServer(None, host="127.0.0.1", port=port, grace_s=1)
            with pytest.raises(ConfigError, match=f"http_port: 127.0.0.1:{port} cannot be bound"):
                with server.bound():
                    raise AssertionError

    async def test_without_a_port_nothing_listens(self):
        server = HttpServer(None, host="127.0.0.1", port=None, grace_s=1)
        with server.bound() as address:
            await asyncio.wait_for(server.serve(), SOON_S)

        assert address == ""

    async def test_one_connection_carries_several_requests(self, serve):
        _, port, _ = serve()
        async with connected(port) as (reader, writer):
            for _ in range(2):
                writer.write(GET)
                async with asyncio.timeout(SOON_S):
                    answer = await reader.readuntil(b"0\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 OK") and b"end" in answer


class TestBounds:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01 is TLS\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nPad: " + b"x" * server_module.HEAD_BYTES + b"\r\n",
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        ],
    )
    async def test_what_is_not_http_or_has_a_huge_head_is_refused_and_closed(self, serve, data):
        _, port, _ = serve()
        async with connected(port) as (reader, writer):
            writer.write(data)
            head, _, body = (await all_of(reader)).partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHo"])
    async def test_a_head_that_does_not_come_is_given_up(self, serve, monkeypatch, data):
        monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.1)
        _, port, _ = serve()
        async with connected(port) as (reader, writer):
            writer.write(data)
            assert await all_of(reader) in (b"", b"reset")

    async def test_a_head_that_drips_in_later_is_given_up_too(self, serve, monkeypatch):
        monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.1)
        _, port, _ = serve()
        async with connected(port) as (reader, writer):
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                await reader.readuntil(b"0\r\n\r\n")
            with pytest.raises(TimeoutError):  # idle connections are kept for longer
                await asyncio.wait_for(reader.read(1), 0.25)
            writer.write(GET[:9])
            assert await all_of(reader) in (b"", b"reset")

    async def test_a_running_answer_may_take_longer_than_a_head(self, serve, app, monkeypatch):
        monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.05)
        app.may_end.clear()
        _, port, _ = serve()
        async with connected(port) as (reader, writer):
            writer.write(GET)
            asyncio.get_running_loop().call_later(0.2, app.may_end.set)
            async with asyncio.timeout(SOON_S):
                assert b"end" in await reader.readuntil(b"0\r\n\r\n")
            writer.write(GET[:9])  # but the next head has its own limit
            assert await all_of(reader) in (b"", b"reset")

    async def test_one_connection_too_many_is_closed(self, serve, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
        _, port, _ = serve()
        async with connected(port) as (first, writer), connected(port) as (second, _):
            assert await all_of(second) in (b"", b"reset")
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                assert b"end" in await first.readuntil(b"0\r\n\r\n")

    async def test_a_client_that_does_not_read_is_paused_and_then_cut(
        self, serve, app, monkeypatch
    ):
        monkeypatch.setattr(server_module, "STALL_TIMEOUT_S", 0.3)
        app.chunk, app.num_chunks = b"x" * 10_000, 10_000
        _, port, _ = serve()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with client:
            client.connect(("127.0.0.1", port))
            client.sendall(GET)
            async with asyncio.timeout(SOON_S):
                await app.gone.wait()

        # Of 100 MB the buffers of both ends took what they hold.
        assert app.num_sent * len(app.chunk) < 2_000_000

    async def test_a_client_that_leaves_is_noticed_while_nothing_is_sent(self, serve, app):
        app.may_end.clear()
        _, port, _ = serve()
        async with connected(port) as (_, writer):
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                await app.started.wait()
        async with asyncio.timeout(SOON_S):
            await app.gone.wait()
        app.may_end.set()


class TestStopping:
    async def test_a_running_answer_ends_while_nobody_else_gets_in(self, serve, app):
        app.may_end.clear()
        server, port, task = serve(grace_s=10)
        async with connected(port) as (reader, writer), connected(port) as (idle, _):
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                await app.started.wait()
            server.stop()
            assert await all_of(idle) == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            app.may_end.set()
            answer = await all_of(reader)
            await asyncio.wait_for(task, SOON_S)

        assert b"end" in answer

    async def test_after_the_grace_an_answer_is_cut_with_a_last_word(self, serve, app, monkeypatch):
        app.may_end.clear()
        server, port, task = serve(grace_s=1)
        async with connected(port) as (reader, writer):
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                await app.started.wait()
            server.stop()
            answer = await all_of(reader)
            await asyncio.wait_for(task, SOON_S)

        assert b"cut" in answer

    async def test_a_cancelled_server_leaves_no_connection_and_no_task(self, serve, app):
        app.may_end.clear()
        _, port, task = serve()
        async with connected(port) as (reader, writer):
            writer.write(GET)
            async with asyncio.timeout(SOON_S):
                await app.started.wait()
            task.cancel()
            assert b"end" not in await all_of(reader)
            await asyncio.wait((task,), timeout=SOON_S)
        assert task.cancelled()
