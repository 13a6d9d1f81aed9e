"""Takes the bodies of requests off the wire, each within a size and a time, all within a sum.

Invariant: `num_held_bytes` is the sum of what the running `body` contexts hold, and ends at zero.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request

from core.errors import Overloaded
from twophase.peer import MAX_MESSAGE_BYTES

# As for gRPC.
MAX_BODY_BYTES = MAX_MESSAGE_BYTES
# Bodies are held before admission counts them.
MAX_HELD_BYTES = 16 * MAX_BODY_BYTES
BODY_TIMEOUT_S = 60.0
JSON_TYPE = "application/json"


class BodyReader:
    """Reads bodies; one per application."""

    def __init__(
        self,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self.num_held_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; it counts as held until the context is left.

        Raises:
            HTTPException: it is no JSON by its headers (415), too large (413) or too late (408).
            Overloaded: the bodies in hand are as large as they may be together.
            ClientDisconnect: the client went away.
        """
        _require_json(request)
        declared = int(request.headers.get("content-length", "0"))
        self._require_fits(declared, self.num_held_bytes + declared)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    num_bytes += len(part)
                    self.num_held_bytes += len(part)
                    self._require_fits(num_bytes, self.num_held_bytes)
                    parts.append(part)
            yield b"".join(parts)
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come in {self._timeout_s:g} s") from error
        finally:
            self.num_held_bytes -= num_bytes

    def _require_fits(self, num_bytes: int, num_held_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            detail = f"the body is {num_bytes} bytes or more; at most {self._max_body_bytes} fit"
            raise HTTPException(413, detail)
        if num_held_bytes > self._max_held_bytes:
            raise Overloaded("too many large requests are being read")


def _require_json(request: Request) -> None:
    """Refuse what a page of another origin could send without being asked (CORS, simple requests).

    It would otherwise reach an endpoint on loopback through its user's own browser.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise HTTPException(415, f"the content-type is {kind[:80]!r}; it must be {JSON_TYPE}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(415, f"the content-encoding is {coding[:80]!r}; send it unpacked")
