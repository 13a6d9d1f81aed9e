"""Errors cross process borders whole, and say in one line what is wrong."""

import copy
import pickle

import pytest

from core import errors
from core.errors import TransferFailure, TwophaseError

EXAMPLES = [
    TwophaseError("it broke"),
    errors.InvalidRequest("top_p", 2.5, "at most 1"),
    errors.DuplicateRequest("r1"),
    errors.Overloaded("full", retry_after_s=2.5),
    errors.DeadlineExceeded("late"),
    errors.Cancelled("gone"),
    errors.PeerLost("decode-0", "killed"),
    errors.PeerStopping("decode-0"),
    errors.TransferFailed(TransferFailure.CHECKSUM, "piece 3"),
    errors.LayoutMismatch("num_layers 1 != 2"),
    errors.ConfigError("router.prt", "is not a known key", "port"),
    errors.ConfigError("router", "is odd"),
    errors.ModelError("no model"),
    errors.DeviceLost("8 steps failed"),
    errors.InvariantBroken("a bug"),
    errors.Unauthenticated("no key"),
    errors.PermissionDenied("no admin"),
    errors.PromptTooLong("prompt", "9 tokens", "at most 8"),
]


def test_there_is_an_example_of_every_error():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    tree = {kind for kind in kinds if issubclass(kind, TwophaseError)}
    assert {type(error) for error in EXAMPLES} == tree


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("cross", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_keeps_kind_text_and_fields_on_the_way(error, cross):
    other = cross(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
    assert other.args == error.args


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EXAMPLES[1], "top_p is 2.5: at most 1"),
        (EXAMPLES[6], "decode-0 was lost: killed"),
        (EXAMPLES[7], "decode-0 was lost: it is stopping"),
        (EXAMPLES[8], "KV transfer failed (checksum): piece 3"),
        (EXAMPLES[9], "KV layouts differ: num_layers 1 != 2"),
        (EXAMPLES[10], "router.prt: is not a known key; did you mean 'port'?"),
        (EXAMPLES[11], "router: is odd"),
    ],
)
def test_an_error_says_in_one_line_what_its_fields_hold(error, text):
    assert str(error) == text
