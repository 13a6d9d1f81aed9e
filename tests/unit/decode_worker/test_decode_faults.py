"""The fault matrix of a decode worker: in every state of a request, everything that can go wrong.

Each row says what the router is told and when the blocks are free again:

    now     at once
    ack     when the writer acknowledged the Abort (it may still write until then)
    gone    when the writer's process is known to be gone
    step    when the running step has ended
    never   the fault does not touch the request: it goes on to its right tokens
"""

import dataclasses

import pytest

from core.config import Mode
from core.errors import (
    DeadlineExceeded,
    TransferFailed,
    TransferFailure,
    TwophaseError,
)
from core.link import Abort, AbortAck, Begin, PieceAck, Seal, Sealed, TransferRefused
from core.worker import NewToken, RequestFailed, Reserved
from kv_transfer.inbound import FENCE_TIMEOUT_S
from tests.unit.decode_worker.driver import (
    LINK,
    World,
    assert_nothing_is_left,
    make_request,
)

DEADLINE_S = 10.0
STATES = ("waiting", "reserved", "receiving", "running", "in step")


class Case:
    """A request `r` in some state, and the faults that may hit it."""

    def __init__(self, state, *, mode=Mode.DISAGGREGATED):
        self.world = world = World(mode, num_blocks=8)
        self.link = world.link()
        self.steps = None
        if state == "waiting":
            world.reserve(make_request("blocker", 27, first=200), session="blocker")
        world.reserve(make_request(deadline_s=DEADLINE_S))
        self.is_granted = state != "waiting"
        if state in ("receiving", "running", "in step"):
            self.link.begin()
            self.link.push(stop=1 if state == "receiving" else None)
        if state in ("running", "in step"):
            self.link.seal()
        if state == "in step":
            self.steps = world.start_step()
        self.used_at_start = world.pool.counts().used

    def cancel(self):
        self.world.cancel()

    def session_lost(self):
        self.world.lose_session()

    def deadline(self):
        self.world.pass_s(DEADLINE_S)

    def link_lost_and_writer_gone(self):
        self.link.lose()

    def link_lost_and_writer_alive(self):
        self.link.lose(is_alive=True)

    def writer_aborts(self):
        epoch = self.world.epoch() if self.is_granted else 1
        answer = self.link.abort(epoch, TransferFailure.ABORTED)
        assert answer == (AbortAck("r", epoch),)

    def bad_checksum(self):
        self.link.take(self.world.pieces()[1], checksum=0)

    def missing_piece(self):
        (answer,) = self.link.seal()
        assert isinstance(answer, TransferRefused)
        assert answer.reason is TransferFailure.MISSING_PIECES

    def piece_outside(self):
        piece = self.world.pieces()[1]
        span = dataclasses.replace(piece.span, first_block=1)
        self.link.take(dataclasses.replace(piece, span=span))

    def take_fails(self):
        now_s, piece = self.world.now_s, self.world.pieces()[1]
        self.world.worker.handoffs.arrive(LINK, piece, now_s)
        self.world.worker.handoffs.take_failed(LINK, piece, "killed", now_s)
        self.world.worker.settle(now_s)

    def step_fails(self):
        self.steps = None
        self.world.worker.step_failed(TwophaseError("boom"), self.world.now_s)

    def end_step(self):
        self.world.end_step(self.steps)
        self.steps = None

    def told(self):
        """The one failure that the router was told, as (kind, transfer reason); None if none."""
        failures = [event for event in self.world.events() if isinstance(event, RequestFailed)]
        if not failures:
            return None
        (failure,) = failures
        assert failure.request_id == "r"
        return type(failure.error), getattr(failure.error, "reason", None)

    def end_blocker(self):
        self.world.cancel("blocker", session="blocker")


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


def finish(case):
    """The request goes on from wherever it is, over a new link if its own is gone."""
    world = case.world
    case.end_blocker()
    if case.steps is not None:
        case.end_step()
    if not world.worker.num_running:
        link = world.link("another") if case.link.is_lost else case.link
        assert all(isinstance(event, Reserved) for event in world.events())
        link.hand_over()
    while world.step():
        pass
    tokens = [event.token_id for event in world.events() if isinstance(event, NewToken)]
    assert tokens == [107, 108]


class TestHowAWriterIsFenced:
    """Blocks of a cancelled handoff come back by whatever proves that nobody writes any more."""

    def cancelled(self):
        case = Case("receiving")
        case.epoch = case.world.epoch()
        case.cancel()
        assert case.link.said[-1].reason is TransferFailure.ABORTED
        assert isinstance(case.link.said[-1], Abort)
        assert case.world.pool.counts().quarantined == 2
        return case

    def test_by_its_acknowledgement(self):
        case = self.cancelled()
        case.link.acknowledge(case.epoch)
        assert_nothing_is_left(case.world)

    def test_by_its_own_abort_that_crossed_ours(self):
        case = self.cancelled()
        assert case.link.abort(case.epoch, TransferFailure.ABORTED) == (
            AbortAck("r", case.epoch),
        )
        assert_nothing_is_left(case.world)

    def test_by_its_seal_that_crossed_our_abort_and_is_refused(self):
        case = self.cancelled()
        (answer,) = case.link.hear(Seal("r", case.epoch, 2, 50))
        assert answer.reason is TransferFailure.ABORTED
        assert_nothing_is_left(case.world)

    def test_by_its_death(self):
        case = self.cancelled()
        case.link.lose()
        assert_nothing_is_left(case.world)

    def test_by_its_death_after_its_link(self):
        case = self.cancelled()
        case.link.lose(is_alive=True)
        assert case.world.pool.counts().quarantined == 2
        case.link.is_alive = False
        case.world.pass_s(0.25)
        assert_nothing_is_left(case.world)

    def test_not_by_a_piece_which_is_taken_off_the_link_and_thrown_away(self):
        case = self.cancelled()
        piece = case.world.pieces()[1]
        assert case.link.take(piece).target_block_ids is None
        assert case.link.said[-1] == PieceAck("r", case.epoch, 1)
        assert case.world.pool.counts().quarantined == 2
        case.link.acknowledge(case.epoch)
        # also once the handoff is forgotten
        assert case.link.take(piece).target_block_ids is None
        assert case.link.said[-1] == PieceAck("r", case.epoch, 1)
        assert_nothing_is_left(case.world)

    def test_not_while_our_own_thread_has_a_piece_in_hand(self):
        case = Case("receiving")
        world, epoch = case.world, case.world.epoch()
        handoffs, piece = world.worker.handoffs, world.pieces()[1]
        handoffs.arrive(LINK, piece, world.now_s)
        case.cancel()
        case.link.acknowledge(epoch)
        assert world.pool.counts().quarantined == 2
        handoffs.landed(LINK, piece, piece.checksum, world.now_s)
        world.worker.settle(world.now_s)
        assert_nothing_is_left(world)

    def test_one_that_leaves_an_abort_unanswered_loses_its_link(self):
        case = self.cancelled()
        case.world.pass_s(FENCE_TIMEOUT_S - 0.1)
        assert case.link.num_drops == 0
        case.world.pass_s(0.1)
        assert case.link.num_drops == 1
        assert case.world.pool.counts().quarantined == 2
        case.link.lose()
        assert_nothing_is_left(case.world)

    def test_only_its_own_handoffs_wait_for_it(self):
        world = World()
        slow, other = world.link("slow"), world.link("other")
        for name, link in (("a", slow), ("b", other)):
            world.reserve(make_request(name, first=ord(name)))
            link.begin(name)
        slow.lose(is_alive=True)
        assert (world.pool.counts().quarantined, world.pool.counts().used) == (2, 2)
        other.push("b")
        other.seal("b")
        world.run()
        assert world.pool.counts().quarantined == 2
        slow.is_alive = False
        world.pass_s(0.25)
        assert_nothing_is_left(world)


class TestAnIdUsedAgainWhileTheOldOneIsFenced:
    def test_gets_other_blocks_and_hears_nothing_of_the_old_life(self):
        # 1 the old life is cancelled, its writer has not answered
        world = World()
        old_link, new_link = world.link("old"), world.link("new")
        world.reserve()
        old_epoch, old_pieces = world.epoch(), world.pieces()
        old_block_ids = world.reservations["r"].block_ids
        old_link.begin()
        world.cancel()
        # 2 the same id again
        (event,) = world.reserve()
        assert world.pool.counts().quarantined == 2
        assert set(event.reservation.block_ids).isdisjoint(old_block_ids)
        assert event.reservation.epoch > old_epoch
        # 3 what the old writer still says touches nothing of the new life
        old_link.take(old_pieces[0])
        (refused,) = old_link.hear(Seal("r", old_epoch, 2, 99))
        assert isinstance(refused, TransferRefused)
        assert world.events() == []
        assert world.worker.num_known == 1
        # 4 the new life ends well
        assert new_link.hand_over() == (Sealed("r", event.reservation.epoch),)
        world.run()
        tokens = [e.token_id for e in world.events() if isinstance(e, NewToken)]
        assert tokens == [107, 108]
        assert_nothing_is_left(world)

    def test_and_fails_with_its_own_error_only(self):
        world = World()
        link = world.link()
        world.reserve()
        old_epoch = world.epoch()
        link.begin()
        world.cancel()
        world.reserve()
        link.begin()
        link.lose()
        assert isinstance(world.error(), TransferFailed)
        assert world.reservations["r"].epoch != old_epoch
        assert_nothing_is_left(world)


class TestWhoMayWrite:
    @pytest.mark.parametrize("message", ["begin", "seal"])
    def test_nobody_into_a_stale_epoch(self, message):
        world = World()
        link = world.link()
        world.reserve()
        epoch = world.epoch()
        stale = Begin("r", epoch - 1) if message == "begin" else Seal("r", epoch - 1, 2, 50)
        (answer,) = link.hear(stale)
        assert answer.reason is TransferFailure.STALE_EPOCH
        assert f"epoch {epoch - 1} of request r" in answer.detail
        assert link.take(dataclasses.replace(world.pieces()[0], epoch=epoch - 1)) is not None
        world.cancel()
        assert_nothing_is_left(world)

    def test_nobody_before_it_was_granted(self):
        world = World()
        link = world.link()
        world.reserve()
        assert link.take(world.pieces()[0]).target_block_ids is None
        (answer,) = link.seal()
        assert answer.reason is TransferFailure.STALE_EPOCH
        link.hand_over()
        world.run()
        assert_nothing_is_left(world)

    @pytest.mark.parametrize("second_id", ["link-0", "link-1"])
    def test_only_the_first_that_began(self, second_id):
        world = World()
        first = world.link()
        second = first if second_id == LINK else world.link(second_id)
        world.reserve()
        first.begin()
        (answer,) = second.begin()
        assert answer.reason is TransferFailure.STALE_EPOCH
        if second is not first:
            assert second.take(world.pieces()[0]).target_block_ids is None
            (answer,) = second.seal()
            assert answer.reason is TransferFailure.STALE_EPOCH
            # its Abort or AbortAck fences nobody else
            assert second.abort(world.epoch(), TransferFailure.ABORTED) == (
                AbortAck("r", world.epoch()),
            )
            second.acknowledge(world.epoch())
            second.lose()
        first.push()
        assert first.seal() == (Sealed("r", world.epoch()),)
        world.run()
        assert_nothing_is_left(world)

    def test_nobody_after_the_lease_is_over(self):
        world = World()
        link = world.link()
        world.reserve(deadline_s=DEADLINE_S)
        epoch = world.epoch()
        world.now_s = DEADLINE_S
        (answer,) = link.hear(Begin("r", epoch))
        assert answer.reason is TransferFailure.STALE_EPOCH
        assert isinstance(world.error(), TransferFailed)
        assert_nothing_is_left(world)


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
    assert world.worker.num_known == 1
    world.run()
    assert world.events("mine") == []
    tokens = [e.token_id for e in world.events("other") if isinstance(e, NewToken)]
    assert tokens == [106, 107, 108]
    assert_nothing_is_left(world)


def test_a_cancel_of_somebody_unknown_changes_nothing():
    world = World()
    world.cancel("nobody")
    world.lose_session("nowhere")
    assert world.events() == []
    assert_nothing_is_left(world)
