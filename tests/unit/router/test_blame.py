"""Who is blamed for a failed attempt, and what the fleet does with a worker that is."""

import pytest

from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerLost,
    PeerStopping,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.worker import Role
from router.members.blame import blamed
from router.members.breaker import FIRST_BACKOFF_S, MAX_FAILURES
from router.placing.placement import Placement
from router.placing.recovery import Failure

STEP = TwophaseError("the step failed")
MOVE = TransferFailed(TransferFailure.CHECKSUM, "piece 3")
PAIR = Placement("prefill-0", "decode-0", "a test", "1", "1")


@pytest.fixture
async def ends(fleet, join):
    await join("prefill-0", Role.PREFILL)
    await join("decode-0")
    return fleet.prefill("prefill-0"), fleet.decode("decode-0")


@pytest.mark.parametrize(
    ("error", "is_from_prefill", "names"),
    [
        (STEP, True, ["prefill-0"]),
        (STEP, False, ["decode-0"]),
        (MOVE, True, ["prefill-0", "decode-0"]),
        (MOVE, False, ["prefill-0", "decode-0"]),
        (PeerLost("decode-0:1", "refused"), True, ["decode-0"]),
        (PeerLost("decode-0", "it ended the link"), True, ["decode-0"]),
        (PeerLost("prefill-0", "killed"), False, ["prefill-0"]),
        (PeerLost("somebody", "gone"), False, ["decode-0"]),
        (PeerStopping("decode-0"), False, []),
        (Overloaded("full"), True, []),
        (InvalidRequest("prompt", "long", "short"), True, []),
        (DeadlineExceeded("late"), False, []),
    ],
)
async def test_each_failure_is_blamed_on_whose_fault_it_may_be(ends, error, is_from_prefill, names):
    members = blamed(Failure(error, is_from_prefill), *ends)
    assert [member.info.name for member in members] == names


async def test_nobody_is_blamed_who_is_gone(ends):
    assert blamed(Failure(STEP, is_from_prefill=True), None, ends[1]) == []
    assert blamed(Failure(MOVE, is_from_prefill=True), None, ends[1]) == [ends[1]]


async def test_a_prefill_worker_that_fails_gets_nothing_until_its_backoff_passed(
    fleet, ends, clock
):
    for _ in range(MAX_FAILURES):
        assert len(fleet.prefill_loads()) == 1
        fleet.blame(PAIR, Failure(STEP, is_from_prefill=True))
    assert fleet.prefill_loads() == []
    clock.advance(FIRST_BACKOFF_S)
    assert len(fleet.prefill_loads()) == 1


async def test_of_the_decode_workers_those_that_fail_are_left_out_unless_all_do(fleet, ends, join):
    await join("decode-1")
    for _ in range(MAX_FAILURES):
        fleet.blame(PAIR, Failure(STEP, is_from_prefill=False))
    assert [load.name for load in fleet.decode_loads()] == ["decode-1"]
    for _ in range(MAX_FAILURES):
        fleet.blame(Placement(None, "decode-1", "a test"), Failure(STEP, is_from_prefill=False))
    assert [load.name for load in fleet.decode_loads()] == ["decode-0", "decode-1"]


async def test_one_call_that_does_not_reach_a_worker_is_enough(fleet, ends):
    error = PeerLost(ends[0].peer.address, "refused")
    fleet.blame(PAIR, Failure(error, is_from_prefill=True))
    assert fleet.prefill_loads() == []


async def test_another_incarnation_is_not_blamed(fleet, ends):
    earlier = Placement("prefill-0", "decode-0", "a test", "0", "0")
    for _ in range(MAX_FAILURES):
        fleet.blame(earlier, Failure(MOVE, is_from_prefill=True))
    assert len(fleet.prefill_loads()) == 1


async def test_a_worker_that_says_that_it_stops_gets_nothing_new(fleet, ends):
    changed = fleet.changed
    fleet.blame(PAIR, Failure(PeerStopping("prefill-0"), is_from_prefill=True))
    assert fleet.prefill_loads() == []
    assert len(fleet.decode_loads()) == 1
    assert changed.is_set()
