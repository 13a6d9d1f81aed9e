"""Core errors as HTTP: one table of status codes, and bodies in the form that OpenAI documents.

::

    {"error": {"message": "...", "type": "...", "param": null, "code": null}}

`param` names the field as the client spelled it. Nothing here knows routes or sockets.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from core import errors
from core.errors import InvalidRequest, Overloaded, PromptTooLong, TwophaseError, Unauthenticated
from twophase.errors import clipped

# Not a field: what is wrong with the body as a whole.
BODY = "body"


@dataclass(frozen=True, slots=True)
class Problem:
    """An HTTP error: what to send instead of an answer."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON that tells it."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


INTERNAL = Problem(500, "The server failed to serve this request.", "server_error")

# 499: the client closed the request, as proxies log it; it is mostly gone by then.
_KINDS: dict[type[TwophaseError], tuple[int, str, str | None]] = {
    errors.InvalidRequest: (400, "invalid_request_error", None),
    errors.PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    errors.Unauthenticated: (401, "invalid_request_error", "invalid_api_key"),
    errors.PermissionDenied: (403, "invalid_request_error", "insufficient_permissions"),
    errors.DuplicateRequest: (409, "invalid_request_error", "duplicate_request"),
    errors.Overloaded: (429, "requests", "rate_limit_exceeded"),
    errors.DeadlineExceeded: (504, "server_error", "deadline_exceeded"),
    errors.Cancelled: (499, "server_error", "cancelled"),
    errors.PeerLost: (503, "server_error", "unavailable"),
    errors.PeerStopping: (503, "server_error", "unavailable"),
    errors.TransferFailed: (503, "server_error", "unavailable"),
}


def problem_of(error: TwophaseError) -> Problem:
    """How HTTP tells `error`."""
    if isinstance(error, InvalidRequest) and error.field == "model":
        message = f"The model {clipped(error.value)!r} does not exist: {error.limit}."
        return Problem(404, message, "invalid_request_error", "model_not_found", "model")
    status, kind, code = _KINDS.get(type(error), (500, "server_error", None))
    headers = {}
    if isinstance(error, Overloaded):
        # Whole seconds are all that the header can say.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    param = None
    if isinstance(error, InvalidRequest) and error.field != BODY:
        param = clipped(error.field)
    return Problem(status, clipped(str(error)), kind, code, param, headers)


def renamed(error: TwophaseError, names: Mapping[str, str]) -> TwophaseError:
    """`error` with its field called as the client called it; `names` maps ours to theirs."""
    if not isinstance(error, InvalidRequest):
        return error
    base, bracket, rest = error.field.partition("[")
    if base not in names:
        return error
    kind = PromptTooLong if isinstance(error, PromptTooLong) else InvalidRequest
    return kind(f"{names[base]}{bracket}{rest}", error.value, error.limit)
