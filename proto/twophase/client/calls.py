"""Single calls of the public clients: the answer, or the error that the server raised."""

from typing import Any

import grpc

from twophase.errors import from_rpc_error


# Any: stubs have no types of their own.
def call(address: str, method: Any, request: Any, timeout_s: float | None) -> Any:
    """What `method` answers; raises errors of the core tree."""
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error


async def call_async(address: str, method: Any, request: Any, timeout_s: float | None) -> Any:
    """As `call`; cancelling it cancels the call."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error


def call_stream(address: str, method: Any, request: Any, timeout_s: float | None) -> list[Any]:
    """All messages that `method` answers with; raises errors of the core tree."""
    try:
        return list(method(request, timeout=timeout_s))
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error
