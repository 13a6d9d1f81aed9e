"""A caller gets the error that the server raised; without its trailer, the nearest by status."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import errors
from core.errors import TwophaseError
from tests.unit.twophase.strategies import all_errors
from twophase.errors import (
    STATUS_CODES,
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


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_a_status(kind):
    assert kind in STATUS_CODES


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, "INVALID_ARGUMENT"),
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
@given(num_letters=st.integers(1, 200_000))
def test_an_error_about_a_huge_value_still_fits_the_metadata_of_a_reply(letter, num_letters):
    error = errors.InvalidRequest("model", letter * num_letters, "this cluster serves another")
    ((key, value),) = trailer(error)
    details_bytes = 3 * len(str(from_wire(WireError.FromString(value))).encode())
    assert len(key) + 4 * len(value) / 3 + details_bytes < MAX_METADATA_BYTES
    other = from_wire(WireError.FromString(value))
    assert (other.field, other.limit) == (error.field, error.limit)
    assert error.value.startswith(other.value.removesuffix("..."))


def test_a_stream_that_ended_is_a_lost_peer_with_the_reason():
    own = errors.PeerLost("decode-0", "killed")
    assert lost("decode-0", own) is own
    assert str(lost("decode-0", None)) == "decode-0 was lost: stream ended"
    assert str(lost("decode-0", TwophaseError("odd"))) == "decode-0 was lost: odd"
