"""Asks every HTTP request for an API key, before its body is read.

Knows no keys: `require_user` and `require_admin` decide. /health and /ready are open, as load
balancers need them, and so are / and the files of the page, which hold nothing of the cluster: a
browser shows a key only with what they fetch. That is for administrators, as the Admin service is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import PermissionDenied, Unauthenticated
from router.http.errors import problem_of
from router.page.routes import FILE_PATHS
from twophase.credentials import AUTHORIZATION, bearer_token

OPEN_PATHS = frozenset({"/health", "/ready", "/"}) | FILE_PATHS
ADMIN_PATHS = "/ui/"


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """An ASGI application before another one; raises nothing, refuses as OpenAI does."""

    app: ASGIApp
    require_user: Callable[[str | None], None]
    require_admin: Callable[[str | None], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, or refuse it."""
        path = scope["path"]
        if path not in OPEN_PATHS:
            require = self.require_admin if path.startswith(ADMIN_PATHS) else self.require_user
            try:
                require(bearer_token(Request(scope).headers.get(AUTHORIZATION)))
            except (Unauthenticated, PermissionDenied) as error:
                problem = problem_of(error)
                refusal = JSONResponse(problem.body, problem.status, dict(problem.headers))
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)
