"""The fault matrix of a decode worker: in every state of a request, everything that can go wrong.

Each row says what the router is told and when the blocks are free again:

    now     at once
    ack     when the writer acknowledged the Abort (it may still write until then)
    gone    when the writer's process is known to be gone
    step    when the running step has ended
    never   the fault does not touch the request: it goes on to its right tokens
"""

import pytest

from core.config import Mode
from core.errors import (
    DeadlineExceeded,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.worker import NewToken, Reserve, Reserved
from kv_transfer.inbound import FENCE_TIMEOUT_S
from tests.unit.decode_worker.case import DEADLINE_S, Case
from tests.unit.decode_worker.driver import (
    World,
    assert_nothing_is_left,
    make_request,
)

STATES = ("waiting", "reserved", "receiving", "running", "in step")


def transfer(reason):
    return TransferFailed, TransferFailure(reason)


LATE = (DeadlineExceeded, None)
MATRIX = [
    ("waiting", "cancel", None, "now"),
    ("waiting", "session_lost", None, "now"),
    ("waiting", "deadline", LATE, "now"),
    ("waiting", "link_lost_and_writer_gone", None, "never"),
    ("waiting", "writer_aborts", None, "never"),
    ("reserved", "cancel", None, "now"),
    ("reserved", "session_lost", None, "now"),
    ("reserved", "deadline", LATE, "now"),
    ("reserved", "link_lost_and_writer_gone", None, "never"),
    ("reserved", "link_lost_and_writer_alive", None, "never"),
    ("reserved", "writer_aborts", None, "never"),
    ("receiving", "cancel", None, "ack"),
    ("receiving", "session_lost", None, "ack"),
    ("receiving", "deadline", LATE, "ack"),
    ("receiving", "link_lost_and_writer_gone", transfer("link_lost"), "now"),
    ("receiving", "link_lost_and_writer_alive", transfer("link_lost"), "gone"),
    ("receiving", "writer_aborts", transfer("aborted"), "now"),
    ("receiving", "bad_checksum", transfer("checksum"), "ack"),
    ("receiving", "missing_piece", transfer("missing_pieces"), "now"),
    ("receiving", "piece_outside", transfer("refused"), "ack"),
    ("receiving", "take_fails", transfer("link_lost"), "ack"),
    ("running", "cancel", None, "now"),
    ("running", "session_lost", None, "now"),
    ("running", "deadline", LATE, "now"),
    ("running", "link_lost_and_writer_gone", None, "never"),
    ("running", "link_lost_and_writer_alive", None, "never"),
    ("running", "writer_aborts", None, "never"),
    ("in step", "cancel", None, "step"),
    ("in step", "session_lost", None, "step"),
    ("in step", "deadline", LATE, "step"),
    ("in step", "step_fails", (TwophaseError, None), "now"),
    ("in step", "link_lost_and_writer_gone", None, "never"),
    ("in step", "writer_aborts", None, "never"),
]


@pytest.mark.parametrize(
    ("state", "fault", "told", "free"), MATRIX, ids=[f"{row[0]}-{row[1]}" for row in MATRIX]
)
def test_each_fault_in_each_state(state, fault, told, free):
    case = Case(state)
    world = case.world
    getattr(case, fault)()
    # 1 the router is told once, or not at all if it knows or need not know
    assert case.told() == told
    # 2 the blocks are free when nobody can touch them any more, and not before
    counts = world.pool.counts()
    match free:
        case "ack":
            assert (counts.used, counts.quarantined) == (0, 2)
            world.pass_s(1.0)
            assert world.pool.counts().quarantined == 2
            assert case.link.acknowledge(world.reservations["r"].epoch) == ()
        case "gone":
            assert (counts.used, counts.quarantined) == (0, 2)
            for _ in range(20):
                world.pass_s(FENCE_TIMEOUT_S)
            assert world.pool.counts().quarantined == 2
            case.link.is_alive = False
            world.pass_s(1.0)
        case "step":
            assert counts.used == case.used_at_start
            case.end_step()
        case "never":
            assert counts.used == case.used_at_start
            finish(case)
    # 3 nothing is left
    assert case.told() is None
    case.end_blocker()
    assert_nothing_is_left(world)


def test_the_matrix_has_every_way_to_give_up_in_every_state():
    rows = {row[:2] for row in MATRIX}
    assert rows >= {(s, fault) for s in STATES for fault in ("cancel", "session_lost", "deadline")}


def finish(case):
    """The request goes on from wherever it is, over a new link if its own is gone."""
    world = case.world
    case.end_blocker()
    if case.steps is not None:
        case.end_step()
    if not world.worker.census.num_running:
        link = world.link("another") if case.link.is_lost else case.link
        assert all(isinstance(event, Reserved) for event in world.events())
        link.hand_over()
    while world.step():
        pass
    tokens = [event.token_id for event in world.events() if isinstance(event, NewToken)]
    assert tokens == [107, 108]


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.COLOCATED])
@pytest.mark.parametrize("fault", ["cancel", "session_lost", "deadline", "step_fails"])
@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_local_prompt_that_is_half_read_gives_its_blocks_back(mode, fault, is_in_step):
    world = World(mode, budget=4)
    world.reserve(num_tokens=11, deadline_s=DEADLINE_S, is_local=True)
    if mode is Mode.CHUNKED:
        world.step()
    steps = world.start_step() if is_in_step or fault == "step_fails" else None
    match fault:
        case "cancel":
            world.cancel()
        case "session_lost":
            world.lose_session()
        case "deadline":
            world.pass_s(DEADLINE_S)
        case "step_fails":
            world.worker.step_failed(TwophaseError("boom"), world.now_s)
    if steps and fault != "step_fails":
        assert world.pool.counts().used == 4
        world.end_step(steps)
    assert_nothing_is_left(world)


def test_a_lost_session_takes_only_its_own_requests():
    world = World(Mode.CHUNKED)
    world.reserve(make_request("mine"), session="mine", is_local=True)
    world.reserve(make_request("other", first=60), session="other", is_local=True)
    world.lose_session("mine")
    assert world.worker.census.num_known == 1
    world.run()
    assert world.events("mine") == []
    tokens = [e.token_id for e in world.events("other") if isinstance(e, NewToken)]
    assert tokens == [106, 107, 108]
    assert_nothing_is_left(world)


def test_nothing_is_kept_to_tell_a_session_that_is_gone():
    world = World(num_blocks=8)
    world.worker.reserve("gone", Reserve(make_request(), prefill_locally=False), world.now_s)
    world.lose_session("gone")
    assert world.worker.take_updates() == {}
    assert_nothing_is_left(world)


def test_a_cancel_of_somebody_unknown_changes_nothing():
    world = World()
    world.cancel("nobody")
    world.lose_session("nowhere")
    assert world.events() == []
    assert_nothing_is_left(world)
