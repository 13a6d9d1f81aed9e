"""Asks every HTTP request for an API key, before its body is read.

Knows no keys: `require` decides. /health and /ready are open, as load balancers need them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import Unauthenticated
from router.http.errors import problem_of
from twophase.credentials import AUTHORIZATION, bearer_token

OPEN_PATHS = frozenset({"/health", "/ready"})


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """An ASGI application before another one; raises nothing, answers 401 as OpenAI does."""

    app: ASGIApp
    require: Callable[[str | None], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, or refuse it."""
        if scope["path"] not in OPEN_PATHS:
            try:
                self.require(bearer_token(Request(scope).headers.get(AUTHORIZATION)))
            except Unauthenticated as error:
                problem = problem_of(error)
                refusal = JSONResponse(problem.body, problem.status, dict(problem.headers))
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)
