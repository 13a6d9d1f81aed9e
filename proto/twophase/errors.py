"""Errors on the wire: one table from core errors to gRPC status codes, and the way back.

Every failed call carries the whole error as a WireError in the trailer `twophase-error-bin`, so
that a Python caller gets the same exception, fields included, that the server raised. Callers in
other languages find the standard's own details beside it (google.rpc.Status), and whoever asked for
an answer what was known of it (`twophase-completion-bin`).
"""

from collections.abc import Iterable
from dataclasses import replace

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from core import errors
from core.completion import Completion
from core.errors import TransferFailure, TwophaseError
from twophase.v1 import inference_pb2, worker_pb2
from twophase.wire import completion_from_wire, completion_to_wire

ERROR_TRAILER = "twophase-error-bin"
DETAILS_TRAILER = "grpc-status-details-bin"
COMPLETION_TRAILER = "twophase-completion-bin"
# gRPC may refuse metadata above 8 KiB. A text travels up to five times in it: as status detail,
# where non-ASCII bytes triple, and as message and field of both trailers, in base64.
MAX_TEXT_BYTES = 500

STATUS_CODES: dict[type[TwophaseError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.PromptTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
    errors.PeerStopping: grpc.StatusCode.UNAVAILABLE,
    errors.DeviceLost: grpc.StatusCode.UNAVAILABLE,
    errors.TransferFailed: grpc.StatusCode.UNAVAILABLE,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvariantBroken: grpc.StatusCode.INTERNAL,
    TwophaseError: grpc.StatusCode.INTERNAL,
}


def to_wire(error: TwophaseError) -> worker_pb2.WireError:
    """The message that holds `error` with its fields, each clipped."""
    fields = {
        name: clipped(str(value))
        for name, value in vars(error).items()
        if value is not None and name != "completion"
    }
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
        case "PromptTooLong":
            return errors.PromptTooLong(fields["field"], fields["value"], fields["limit"])
        case "DuplicateRequest":
            return errors.DuplicateRequest(fields["value"])
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
        "DeviceLost": errors.DeviceLost,
        "Unauthenticated": errors.Unauthenticated,
        "PermissionDenied": errors.PermissionDenied,
        "ModelError": errors.ModelError,
    }
    return plain.get(message.kind, TwophaseError)(message.message)


def status_code(error: TwophaseError) -> grpc.StatusCode:
    """The gRPC status that tells `error`."""
    return STATUS_CODES[type(error)]


def trailer(error: TwophaseError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries `error` whole, and what was known of the request it ended."""
    trailers = [
        (ERROR_TRAILER, to_wire(error).SerializeToString()),
        (DETAILS_TRAILER, _status(error).SerializeToString()),
    ]
    if error.completion is not None:
        known = completion_to_wire(_brief(error.completion))
        trailers.append((COMPLETION_TRAILER, known.SerializeToString()))
    return tuple(trailers)


def _status(error: TwophaseError) -> status_pb2.Status:
    """The error in the words of google.rpc, as `grpc_status.rpc_status.from_call` reads it."""
    code: int = status_code(error).value[0]
    status = status_pb2.Status(code=code, message=clipped(str(error)))
    detail: Message | None = None
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=clipped(error.field), description=clipped(f"is {error.value}: {error.limit}")
        )
        detail = error_details_pb2.BadRequest(field_violations=[violation])
    elif isinstance(error, errors.Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        detail = retry
    if detail is not None:
        status.details.add().Pack(detail)
    return status


def _brief(completion: Completion) -> Completion:
    """With the last failure alone, which fits into the metadata."""
    last = tuple(clipped(failure) for failure in completion.failures[-1:])
    return replace(completion, failures=last, placement=clipped(completion.placement))


def from_rpc_error(error: grpc.RpcError, peer: str) -> TwophaseError:
    """The error that ended a call to `peer`: the one from its trailer, or one by status."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.PeerLost(peer, str(error))
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    trailers = {key: value for key, value in metadata if isinstance(value, bytes)}
    if ERROR_TRAILER not in trailers:
        return _by_status(error, peer)
    found = from_wire(worker_pb2.WireError.FromString(trailers[ERROR_TRAILER]))
    if COMPLETION_TRAILER in trailers:
        known = inference_pb2.Completion.FromString(trailers[COMPLETION_TRAILER])
        found.completion = completion_from_wire(known)
    return found


def _by_status(error: grpc.Call | grpc.aio.AioRpcError, peer: str) -> TwophaseError:
    detail = f"{error.code().name}: {error.details() or 'no detail'}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled(f"the call to {peer} was cancelled")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in detail:
            return errors.InvalidRequest("message", "too large", detail)  # gRPC's own refusal
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(detail)
        case grpc.StatusCode.UNAUTHENTICATED:
            return errors.Unauthenticated(detail)
        case grpc.StatusCode.PERMISSION_DENIED:
            return errors.PermissionDenied(detail)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest("request", "not acceptable", detail)
    return errors.PeerLost(peer, detail)
