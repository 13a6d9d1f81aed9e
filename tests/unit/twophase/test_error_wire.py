"""A caller gets the error that the server raised; without its trailer, the nearest by status."""

import dataclasses

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from core import errors
from core.errors import TwophaseError
from tests.unit.twophase.strategies import all_errors, completions
from twophase.errors import (
    ERROR_TRAILER,
    STATUS_CODES,
    clipped,
    from_rpc_error,
    from_wire,
    status_code,
    to_wire,
    trailer,
)
from twophase.peer import lost
from twophase.v1.worker_pb2 import WireError

# gRPC refuses metadata above 8 KiB at random and above 16 KiB always; headers take some of it.
MAX_METADATA_BYTES = 8192 - 512
TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TwophaseError)
]


def rpc_error(code, details="", metadata=()):
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=details
    )


@given(all_errors)
def test_an_error_comes_back_with_kind_text_and_fields(error):
    other = from_wire(WireError.FromString(to_wire(error).SerializeToString()))
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


@given(all_errors)
def test_a_failed_call_raises_what_the_server_raised(error):
    metadata = (("other", "x"), *trailer(error))
    other = from_rpc_error(rpc_error(status_code(error), "ignored", metadata), "decode-0")
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


@given(all_errors, completions)
def test_what_was_known_of_the_answer_comes_along(error, completion):
    error.completion = completion
    other = from_rpc_error(rpc_error(status_code(error), "ignored", trailer(error)), "router")
    assert (type(other), str(other)) == (type(error), str(error))
    known = dataclasses.replace(completion, failures=completion.failures[-1:])
    assert other.completion == known


@given(all_errors)
def test_callers_in_any_language_find_the_standards_details(error):
    call = rpc_error(status_code(error), clipped(str(error)), trailer(error))
    status = rpc_status.from_call(call)
    assert (status.code, status.message) == (status_code(error).value[0], clipped(str(error)))
    details = {detail.TypeName(): detail for detail in status.details}
    if isinstance(error, errors.InvalidRequest):
        bad = error_details_pb2.BadRequest.FromString(details.pop("google.rpc.BadRequest").value)
        [violation] = bad.field_violations
        assert violation.field == error.field
        assert violation.description == f"is {error.value}: {error.limit}"
    if isinstance(error, errors.Overloaded):
        retry = error_details_pb2.RetryInfo.FromString(details.pop("google.rpc.RetryInfo").value)
        assert retry.retry_delay.ToNanoseconds() == int(error.retry_after_s * 1e9)
    assert details == {}


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_a_status(kind):
    assert kind in STATUS_CODES


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, "INVALID_ARGUMENT"),
        (errors.DuplicateRequest, "ALREADY_EXISTS"),
        (errors.PromptTooLong, "INVALID_ARGUMENT"),
        (errors.Overloaded, "RESOURCE_EXHAUSTED"),
        (errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (errors.Cancelled, "CANCELLED"),
        (errors.PeerLost, "UNAVAILABLE"),
        (errors.PeerStopping, "UNAVAILABLE"),
        (errors.TransferFailed, "UNAVAILABLE"),
        (errors.LayoutMismatch, "FAILED_PRECONDITION"),
        (errors.ConfigError, "FAILED_PRECONDITION"),
        (errors.ModelError, "FAILED_PRECONDITION"),
        (errors.InvariantBroken, "INTERNAL"),
        (errors.Unauthenticated, "UNAUTHENTICATED"),
        (errors.PermissionDenied, "PERMISSION_DENIED"),
        (TwophaseError, "INTERNAL"),
    ],
)
def test_each_error_is_told_by_its_status(kind, code):
    assert STATUS_CODES[kind].name == code


@pytest.mark.parametrize("kind", ["FromTheFuture", "InvariantBroken"])
def test_an_unknown_error_and_anothers_bug_are_just_errors(kind):
    other = from_wire(WireError(kind=kind, message="what happened"))
    assert type(other) is TwophaseError
    assert str(other) == "what happened"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (grpc.StatusCode.UNAVAILABLE, errors.PeerLost),
        (grpc.StatusCode.INTERNAL, errors.PeerLost),
        (grpc.StatusCode.UNKNOWN, errors.PeerLost),
    ],
)
def test_without_a_trailer_the_status_decides(code, kind):
    error = from_rpc_error(rpc_error(code, "why"), "decode-0")
    assert type(error) is kind
    assert "decode-0" in str(error) or "why" in str(error)


def test_a_failure_that_is_no_call_is_a_lost_peer():
    error = from_rpc_error(grpc.RpcError("broken"), "decode-0")
    assert (type(error), error.peer, error.why) == (errors.PeerLost, "decode-0", "broken")


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600"])
@given(num_letters=st.integers(1, 200_000), completion=completions)
def test_an_error_about_a_huge_value_still_fits_the_metadata_of_a_reply(
    letter, num_letters, completion
):
    error = errors.InvalidRequest("model", letter * num_letters, "this cluster serves another")
    error.completion = dataclasses.replace(
        completion, failures=(letter * num_letters,) * 3, placement=letter * num_letters
    )
    trailers = trailer(error)
    details_bytes = 3 * len(clipped(str(error)).encode())
    trailers_bytes = sum(len(key) + 4 * len(value) / 3 for key, value in trailers)
    assert trailers_bytes + details_bytes < MAX_METADATA_BYTES
    other = from_wire(WireError.FromString(dict(trailers)[ERROR_TRAILER]))
    assert (other.field, other.limit) == (error.field, error.limit)
    assert error.value.startswith(other.value.removesuffix("..."))


def test_a_stream_that_ended_is_a_lost_peer_with_the_reason():
    own = errors.PeerLost("decode-0", "killed")
    assert lost("decode-0", own) is own
    assert str(lost("decode-0", None)) == "decode-0 was lost: stream ended"
    assert str(lost("decode-0", TwophaseError("odd"))) == "decode-0 was lost: odd"
