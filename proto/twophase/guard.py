"""Around every method with one request message: no bytes and no bug end a call in anybody's face.

What cannot be parsed is INVALID_ARGUMENT, not gRPC's own UNKNOWN with a Python class in it. A bug,
also one in a reply, is logged with its traceback and the request's id, and the caller is told
INTERNAL at once, without details.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from core.errors import InvalidRequest, TwophaseError
from twophase.errors import status_code, trailer


# Any in this module: gRPC's handlers and messages are untyped.
class Guard(grpc.aio.ServerInterceptor):
    """The last interceptor of a server, next to its servicers."""

    def __init__(self) -> None:
        self._log = logging.getLogger("twophase.server")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, guarded."""
        handler = await continuation(handler_call_details)
        behavior = handler and (handler.unary_unary or handler.unary_stream)
        if not inspect.iscoroutinefunction(behavior):
            return handler  # unknown, or streams of messages, which are read one by one

        async def guarded(data: bytes, context: Any) -> Any:
            return await self._call(handler_call_details.method, handler, data, context)

        # Bytes in and out: parsing and writing happen under guard.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                guarded, response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(guarded)

    async def _call(self, method: str, handler: Any, data: bytes, context: Any) -> Any:
        request = None
        error: TwophaseError
        try:
            request = handler.request_deserializer(data)
            if handler.response_streaming:
                return await handler.unary_stream(request, context)
            return handler.response_serializer(await handler.unary_unary(request, context))
        except grpc.aio.BaseError:
            raise  # aborted, or the client is gone
        except DecodeError:
            limit = "must be what the method takes, in protobuf, its text in UTF-8"
            error = InvalidRequest("message", f"{len(data)} unreadable bytes", limit)
        except Exception:  # root of the call: it fails, the server lives
            asked = getattr(request, "request", request)  # GenerateOnce wraps what is asked
            request_id = getattr(asked, "request_id", "")
            self._log.exception("%s failed, request %r", method, request_id)
            error = TwophaseError("the server failed to serve this call")
        await context.abort(status_code(error), str(error), trailer(error))
