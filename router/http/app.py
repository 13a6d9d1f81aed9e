"""The routes, and the life of one HTTP request.

1 the body is read, within a size and a time     4 disconnect: the request is cancelled and freed
2 its fields become an Incoming (`body`)         5 a failure before the first token is a status,
3 `Generation.run` serves it; each delivery         after it an event that ends the stream
  becomes events of a stream, or is collected

A stream's status line goes out with its first token. Knows no workers and no sockets; runs in the
router's event loop.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from core.clock import Clock
from core.completion import Chunk, Completion
from core.errors import PeerLost, TwophaseError
from core.request import Logprobs
from router.generation import Generation, Incoming
from router.http import openapi
from router.http.body import Body, Kind, defaults_of, read_body
from router.http.errors import INTERNAL, Problem, problem_of, renamed
from router.http.logprobs import NO_ECHO, Echo
from router.http.reading import JSON_TYPE, BodyReader
from router.http.replies import Replies, Sent, error_event, server_timing
from router.readiness import Readiness
from router.request import Defaults, check_model, request_id_of
from router.several import Delivery
from router.telemetry.exposition import CONTENT_TYPE

EVENTS_TYPE = "text/event-stream; charset=utf-8"
# Larger bodies are unpacked in a thread, so that running streams go on meanwhile.
SMALL_BODY_BYTES = 64 << 10

Outcome = tuple[Completion, ...] | TwophaseError


@dataclass(frozen=True, slots=True)
class HttpApp:
    """The routes and what they need; `asgi` makes the application."""

    generation: Generation
    readiness: Readiness
    model: str
    defaults: Defaults
    clock: Clock
    metrics: Callable[[], bytes]
    bodies: BodyReader = field(default_factory=BodyReader)

    def asgi(self) -> Starlette:
        """The ASGI application."""
        app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model_of_name),
                Route(openapi.PATH, self.openapi),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.tell_metrics),
            ],
            exception_handlers={
                HTTPException: _refused,
                TwophaseError: _failed,
                ClientDisconnect: _gone,
                Exception: _broken,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def completions(self, request: Request) -> "Reply":
        """POST /v1/completions."""
        return await self._reply(request, Kind.TEXT)

    async def chat_completions(self, request: Request) -> "Reply":
        """POST /v1/chat/completions."""
        return await self._reply(request, Kind.CHAT)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model_of_name(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        check_model(request.path_params["model"], self.generation.limits())
        return JSONResponse(self._model())

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: what the bodies may hold."""
        return JSONResponse(openapi.description(version("twophase")))

    async def health(self, request: Request) -> Response:
        """GET /health: the process is alive."""
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: a token can flow through both pools."""
        if self.readiness.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503)

    async def tell_metrics(self, request: Request) -> Response:
        """GET /metrics: docs/metrics.md, in Prometheus' text format."""
        return Response(self.metrics(), headers={"content-type": CONTENT_TYPE})

    def _model(self) -> dict[str, object]:
        limits = self.generation.limits()
        return {
            "id": limits.model,
            "object": "model",
            "created": 0,
            "owned_by": "twophase",
            "max_model_len": limits.max_context_tokens,
        }

    async def _reply(self, request: Request, kind: Kind) -> "Reply":
        async with self.bodies.body(request) as data:
            received_s = self.clock.now_s()
            if len(data) <= SMALL_BODY_BYTES:
                body = read_body(data, kind)
            else:
                body = await asyncio.to_thread(read_body, data, kind)
        incoming = Incoming(
            request_id=request_id_of(""),
            model=body.model,
            prompt=body.prompt,
            asked=body.asked,
            received_s=received_s,
            defaults=defaults_of(kind, self.defaults),
            sender=body.sender,
        )
        replies = Replies(
            kind,
            body,
            incoming.request_id,
            model=self.model,
            created=int(time.time()),
            bytes_of=self.generation.bytes_of,
        )
        return Reply(self.generation, incoming, body, replies)


class Reply:
    """One answer on its way: an ASGI response that is called once."""

    def __init__(
        self, generation: Generation, incoming: Incoming, body: Body, replies: Replies
    ) -> None:
        self._generation = generation
        self._incoming = incoming
        self._body = body
        self._replies = replies
        self._chunks: list[Chunk] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._echo = NO_ECHO
        self._sent: defaultdict[int, Sent] = defaultdict(Sent)
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request and write its answer; returns early when the client is gone."""
        outcome: Outcome | None
        try:
            outcome = await _unless_gone(receive, self._run(send))
        except asyncio.CancelledError:
            # The router stops and its time to drain is over: this task ends here, with a word.
            outcome = PeerLost("router", "it is shutting down")
        if isinstance(outcome, tuple):
            await self._finish(outcome, send)
        elif outcome is not None:
            problem = problem_of(renamed(outcome, self._body.names))
            await self._fail(problem, scope, receive, send)

    async def _run(self, send: Send) -> Outcome:
        async def deliver(delivery: Delivery) -> None:
            told = delivery.chunks[0].prompt_logprobs
            if told:
                self._prompt_logprobs += told
                return
            if self._body.echo and self._echo is NO_ECHO:
                self._echo = await asyncio.to_thread(self._echo_of, delivery)
            if self._body.is_stream:
                await self._stream(delivery, send)
            else:
                self._chunks.extend(delivery.chunks)

        try:
            return await self._generation.run(self._incoming, deliver)
        except TwophaseError as error:
            return error

    async def _stream(self, delivery: Delivery, send: Send) -> None:
        opening = b""
        if not self._is_started:
            self._is_started = True
            # nginx would otherwise hold events back until its buffer is full.
            headers = self._headers(EVENTS_TYPE) | {"x-accel-buffering": "no"}
            await send(_start(200, headers))
            opening = self._replies.opening()
        index = delivery.chunks[0].index
        if self._body.echo and index not in self._sent:
            echo, sent = await asyncio.to_thread(self._replies.echo, self._echo, index)
            opening, self._sent[index] = opening + echo, sent
        events = self._replies.events(delivery, self._sent[index])
        self._sent[index] = self._sent[index].after(delivery.chunks)
        await send(_data(opening + events, is_last=False))

    def _echo_of(self, delivery: Delivery) -> Echo:
        token_ids = delivery.request.prompt_token_ids
        pieces = self._generation.pieces_of(token_ids)
        is_scored = self._body.asked.num_prompt_logprobs is not None
        return Echo(token_ids, pieces, self._prompt_logprobs if is_scored else None)

    async def _finish(self, completions: tuple[Completion, ...], send: Send) -> None:
        if self._body.is_stream:
            await send(_data(self._replies.ending(completions), is_last=True))
            return
        if self._body.echo:
            whole = self._replies.whole
            data = await asyncio.to_thread(whole, self._chunks, completions, self._echo)
        else:
            data = self._replies.whole(self._chunks, completions)
        headers = {
            **self._headers(JSON_TYPE),
            "content-length": str(len(data)),
            "server-timing": server_timing(completions[0].phases),
        }
        await send(_start(200, headers))
        await send(_data(data, is_last=True))

    async def _fail(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_started:
            await send(_data(error_event(problem), is_last=True))
        else:
            headers = self._headers(JSON_TYPE) | dict(problem.headers)
            await JSONResponse(problem.body, problem.status, headers)(scope, receive, send)

    def _headers(self, content_type: str) -> dict[str, str]:
        return {
            "content-type": content_type,
            "x-request-id": self._incoming.request_id,
            "cache-control": "no-store",
        }


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """What `work` returns; None, with `work` cancelled and over, if the client goes away first."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work)
        watching = tasks.create_task(_until_gone(receive))
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        watching.cancel()
    return None if working.cancelled() else working.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Mapping[str, str]) -> Message:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def _data(data: bytes, *, is_last: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _response(problem: Problem) -> Response:
    return JSONResponse(problem.body, problem.status, dict(problem.headers))


async def _refused(request: Request, error: Exception) -> Response:
    """What Starlette or the reading of a body refused."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path[:200]}"
    headers = error.headers or {}
    return _response(Problem(error.status_code, message, "invalid_request_error", headers=headers))


async def _failed(request: Request, error: Exception) -> Response:
    """What was wrong before the request could run."""
    assert isinstance(error, TwophaseError)
    return _response(problem_of(error))


async def _gone(request: Request, error: Exception) -> Response:
    """The client left before its body was complete: nobody reads this."""
    return Response(status_code=408)


async def _broken(request: Request, error: Exception) -> Response:
    """A bug; the server logs it with its traceback."""
    return _response(INTERNAL)
