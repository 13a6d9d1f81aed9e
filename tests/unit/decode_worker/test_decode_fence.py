"""Who may write into a reservation, and when its blocks are safe again."""

import dataclasses

import pytest

from core.errors import TransferFailed, TransferFailure
from core.link import Abort, AbortAck, Begin, PieceAck, Seal, Sealed, TransferRefused
from core.worker import NewToken
from kv_transfer.inbound import FENCE_TIMEOUT_S
from tests.unit.decode_worker.case import DEADLINE_S, Case
from tests.unit.decode_worker.driver import LINK, World, assert_nothing_is_left, make_request


@pytest.mark.case("B-001", "B-014")
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
        assert case.link.abort(case.epoch, TransferFailure.ABORTED) == (AbortAck("r", case.epoch),)
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

    def test_not_by_time_which_the_gauge_of_quarantine_counts_until_the_writer_is_fenced(self):
        case = self.cancelled()
        handoffs, world = case.world.worker.handoffs, case.world
        assert handoffs.quarantine_age_s(world.now_s) == 0.0
        world.pass_s(1.5)
        assert handoffs.quarantine_age_s(world.now_s) == 1.5
        case.link.acknowledge(case.epoch)
        assert handoffs.quarantine_age_s(world.now_s) == 0.0
        assert_nothing_is_left(world)

    def test_not_by_a_piece_which_is_taken_off_the_link_and_thrown_away(self):
        case = self.cancelled()
        piece = case.world.pieces()[1]
        assert case.link.take(piece).target_block_ids is None
        assert case.link.said[-1] == PieceAck("r", case.epoch, 1)
        assert case.world.pool.counts().quarantined == 2
        case.link.acknowledge(case.epoch)
        # also once the handoff is forgotten
        num_said = len(case.link.said)
        assert case.link.take(piece).target_block_ids is None
        assert case.link.said[num_said:] == [PieceAck("r", case.epoch, 1)]
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


@pytest.mark.case("B-046")
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
        assert world.worker.census.num_known == 1
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
