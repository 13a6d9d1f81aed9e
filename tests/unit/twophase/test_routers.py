"""A client goes from router to router, tells each what it has, and gives up when all are lost."""

from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    TransferFailed,
    TransferFailure,
)
from twophase.client.routers import PATIENCE_S, ROUND_S, Asking, Routers, Tries
from twophase.credentials import Credentials
from twophase.v1 import inference_pb2 as pb

LOST = PeerLost("router", "gone")


@pytest.fixture
def routers():
    routers = Routers(grpc, ["a:1", "b:1", "c:1"], Credentials())
    yield routers
    for router in routers.all:
        router.channel.close()


@pytest.fixture
def clock(monkeypatch):
    clock = ManualClock(50.0)
    monkeypatch.setattr(
        "twophase.client.routers.time", SimpleNamespace(monotonic=lambda: clock.now_s())
    )
    return clock


def test_a_client_that_knows_no_router_is_refused():
    with pytest.raises(ConfigError, match="names no router"):
        Routers(grpc, [], Credentials())


def test_each_router_is_tried_in_turn_and_later_calls_begin_where_the_last_one_was(routers):
    tries = Tries(routers)
    assert tries.lost(LOST) == 0.0
    assert tries.router.address == routers.current.address == "b:1"
    assert tries.lost(TransferFailed(TransferFailure.LINK_LOST, "cut")) == 0.0
    assert tries.lost(LOST) == ROUND_S
    assert tries.router.address == routers.current.address == "a:1"


def test_once_all_were_lost_for_long_the_last_error_is_raised(routers, clock):
    tries = Tries(routers)
    for _ in range(6):
        tries.lost(LOST)
    clock.advance(PATIENCE_S)
    tries.lost(LOST)
    tries.lost(LOST)
    last = PeerLost("c:1", "gone for good")
    with pytest.raises(PeerLost, match="for good"):
        tries.lost(last)
    assert tries.router.address == "c:1"


def test_a_token_in_between_begins_the_patience_anew(routers, clock):
    tries = Tries(routers)
    tries.lost(LOST)
    clock.advance(PATIENCE_S)
    tries.answered()
    for _ in range(9):
        tries.lost(LOST)


def test_a_client_of_one_router_is_told_at_once():
    routers = Routers(grpc, "a:1", Credentials())
    with pytest.raises(PeerLost):
        Tries(routers).lost(LOST)


def test_whoever_loses_the_same_router_later_moves_nobody(routers):
    first, second = Tries(routers), Tries(routers)
    first.lost(LOST)
    second.lost(LOST)
    assert routers.current.address == "b:1"


@pytest.mark.parametrize("error", [InvalidRequest("f", 1, "no"), Overloaded("full")])
def test_what_no_other_router_would_do_better_is_raised_at_once(routers, error):
    with pytest.raises(type(error)):
        Tries(routers).lost(error)
    assert routers.current.address == "a:1"


@given(st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=3), max_size=6))
def test_the_next_router_is_told_every_token_and_the_seed(parts):
    routers = Routers(grpc, ["a:1", "b:1"], Credentials())
    asking = Asking(pb.GenerateRequest(), routers, None)
    for number, part in enumerate(parts):
        seed = 7 if number == 0 else None
        asking.take(pb.GenerateResponse(token_ids=part, seed=seed))
    asking.lost(LOST)
    assert asking.message.HasField("resumption")
    assert list(asking.message.resumption.token_ids) == [i for part in parts for i in part]
    assert asking.message.sampling.HasField("seed") == bool(parts)
    assert asking.message.request_id
    assert asking.router.address == "b:1"


def test_a_router_that_is_lost_after_the_end_is_no_loss(routers):
    asking = Asking(pb.GenerateRequest(), routers, None)
    asking.take(pb.GenerateResponse(completion=pb.Completion(finish_reason=pb.FINISH_REASON_STOP)))
    asking.lost(LOST)
    assert asking.is_over
    assert not asking.message.HasField("resumption")
