"""Errors on the wire: one table from core errors to gRPC status codes, and the way back.

Every failed call carries the whole error as a WireError in the trailer `twophase-error-bin`, so
that a Python caller gets the same exception, fields included, that the server raised.
"""

from collections.abc import Iterable

import grpc

from core import errors
from core.errors import TransferFailure, TwophaseError
from twophase.v1 import worker_pb2

ERROR_TRAILER = "twophase-error-bin"
# gRPC may refuse metadata above 8 KiB. A text travels up to three times in it: as status detail,
# where non-ASCII bytes triple, as message and as field, both in base64.
MAX_TEXT_BYTES = 1000

STATUS_CODES: dict[type[TwophaseError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
    errors.PeerStopping: grpc.StatusCode.UNAVAILABLE,
    errors.TransferFailed: grpc.StatusCode.UNAVAILABLE,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvariantBroken: grpc.StatusCode.INTERNAL,
    TwophaseError: grpc.StatusCode.INTERNAL,
}


def to_wire(error: TwophaseError) -> worker_pb2.WireError:
    """The message that holds `error` with its fields, each clipped."""
    fields = {name: clipped(str(value)) for name, value in vars(error).items() if value is not None}
    return worker_pb2.WireError(
        kind=type(error).__name__, message=clipped(str(error)), fields=fields
    )


def clipped(text: str) -> str:
    """`text`, or as much of it as an error may carry."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_TEXT_BYTES:
        return text
    return encoded[:MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def from_wire(message: worker_pb2.WireError) -> TwophaseError:
    """The error that `message` holds; an unknown kind becomes the root of the tree."""
    fields = message.fields
    match message.kind:
        case "InvalidRequest":
            return errors.InvalidRequest(fields["field"], fields["value"], fields["limit"])
        case "Overloaded":
            return errors.Overloaded(message.message, retry_after_s=float(fields["retry_after_s"]))
        case "PeerLost":
            return errors.PeerLost(fields["peer"], fields["why"])
        case "PeerStopping":
            return errors.PeerStopping(fields["peer"])
        case "TransferFailed":
            return errors.TransferFailed(TransferFailure(fields["reason"]), fields["detail"])
        case "LayoutMismatch":
            return errors.LayoutMismatch(fields["differences"])
        case "ConfigError":
            return errors.ConfigError(
                fields["path"], fields["problem"], fields.get("suggestion") or None
            )
    plain: dict[str, type[TwophaseError]] = {
        "DeadlineExceeded": errors.DeadlineExceeded,
        "Cancelled": errors.Cancelled,
        "ModelError": errors.ModelError,
    }
    return plain.get(message.kind, TwophaseError)(message.message)


def status_code(error: TwophaseError) -> grpc.StatusCode:
    """The gRPC status that tells `error`."""
    return STATUS_CODES[type(error)]


def trailer(error: TwophaseError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries `error` whole."""
    return ((ERROR_TRAILER, to_wire(error).SerializeToString()),)


def from_rpc_error(error: grpc.RpcError, peer: str) -> TwophaseError:
    """The error that ended a call to `peer`: the one from its trailer, or one by status."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.PeerLost(peer, str(error))
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return from_wire(worker_pb2.WireError.FromString(value))
    return _by_status(error, peer)


def _by_status(error: grpc.Call | grpc.aio.AioRpcError, peer: str) -> TwophaseError:
    detail = f"{error.code().name}: {error.details() or 'no detail'}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled(f"the call to {peer} was cancelled")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(detail)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest("request", "not acceptable", detail)
    return errors.PeerLost(peer, detail)
