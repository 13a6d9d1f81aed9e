"""A client goes from router to router, tells each what it has, and gives up when all are lost."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    TransferFailed,
    TransferFailure,
)
from twophase.client.routers import Asking, Routers, Tries
from twophase.credentials import Credentials
from twophase.v1 import inference_pb2 as pb

LOST = PeerLost("router", "gone")


@pytest.fixture
def routers():
    routers = Routers(grpc, ["a:1", "b:1", "c:1"], Credentials())
    yield routers
    for router in routers.all:
        router.channel.close()


def test_a_client_that_knows_no_router_is_refused():
    with pytest.raises(ConfigError, match="names no router"):
        Routers(grpc, [], Credentials())


def test_each_router_is_tried_once_and_later_calls_begin_where_the_last_one_was(routers):
    tries = Tries(routers)
    tries.lost(LOST)
    assert tries.router.address == routers.current.address == "b:1"
    tries.lost(TransferFailed(TransferFailure.LINK_LOST, "cut"))
    with pytest.raises(PeerLost):
        tries.lost(LOST)
    assert routers.current.address == "a:1"


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
