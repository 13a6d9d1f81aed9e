"""Lives of one handoff, told from both ends: what is said, what is proven, who frees when."""

import dataclasses

import pytest

from core.errors import TransferFailure
from core.layout import Dtype, KVLayout
from core.link import (
    Abort,
    AbortAck,
    Begin,
    Granted,
    Piece,
    PieceAck,
    Seal,
    Sealed,
    TransferRefused,
)
from core.request import RequestId
from kv_transfer.inbound import FENCE_TIMEOUT_S, InboundState, InboundTransfer
from kv_transfer.outbound import OutboundState, OutboundTransfer
from kv_transfer.plan import PieceSizes, Reservation, span_bytes

LAYOUT = KVLayout("w", Dtype.BFLOAT16, block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)
RESERVATION = Reservation(RequestId("r"), 7, (5, 9, 2, 11), num_prompt_tokens=10)
SOURCE_IDS = (20, 21, 22)
LEASE_S = 30.0


def inbound(reservation=RESERVATION):
    return InboundTransfer(reservation, layout=LAYOUT, lease_until_s=LEASE_S)


def outbound(reservation=RESERVATION, max_piece_bytes=2 * LAYOUT.page_bytes * 3, min_piece_bytes=1):
    return OutboundTransfer(
        reservation,
        layout=LAYOUT,
        backend="memory",
        sizes=PieceSizes(min_piece_bytes, max_piece_bytes),
        deadline_s=LEASE_S,
    )


def pieces_of(reservation=RESERVATION, **limits):
    """Headers of a whole handoff, as its prefill worker would send them."""
    sender = outbound(reservation, **limits)
    sender.begin()
    sender.granted()
    sender.computed(reservation.num_prompt_tokens, SOURCE_IDS, now_s=0.0, first_token_id=42)
    headers = []
    while piece := sender.next_piece(0.0):
        headers.append(sender.sent(100 + piece.piece_id.index)[0])
    return headers


def take(receiver, piece, now_s=0.0, checksum=None):
    arrival = receiver.arrive(piece, now_s)
    return arrival, receiver.landed(piece, piece.checksum if checksum is None else checksum, now_s)


class TestAWholeHandoff:
    def test_ends_sealed_on_both_sides_with_the_bytes_of_the_formula(self):
        sender, receiver = outbound(), inbound()
        # 1 prefill asks, decode grants
        assert sender.begin() == (Begin("r", 7),)
        assert receiver.begin(0.0) == (Granted("r", 7),)
        assert sender.granted() == ()
        # 2 the first chunk completes two of three blocks
        assert sender.computed(9, SOURCE_IDS, now_s=1.0, first_token_id=42) == ()
        # 3 they are pushed
        sent = []
        while piece := sender.next_piece(1.0):
            sent.append(piece)
            (header,) = sender.sent(checksum=5)
            arrival, replies = take(receiver, header)
            assert arrival.target_block_ids == piece.target_block_ids == (5, 9)
            assert replies == (PieceAck("r", 7, piece.piece_id.index),)
            sender.acknowledged(piece.piece_id.index)
        assert [piece.source_block_ids for piece in sent] == [(20, 21)] * 2
        # 4 the last chunk brings the partial block; the Seal follows the last header
        assert sender.computed(10, SOURCE_IDS, now_s=2.0, first_token_id=42) == ()
        piece = sender.next_piece(2.0)
        header, seal = sender.sent(checksum=6)
        assert seal == Seal("r", 7, 3, first_token_id=42)
        assert sender.state is OutboundState.SEALING
        take(receiver, header)
        sender.acknowledged(piece.piece_id.index)
        # 5 decode proves it
        assert receiver.seal(seal.num_pieces, 3.0) == (Sealed("r", 7),)
        sender.sealed(3.5)
        # 6 nothing is left
        assert sender.state is OutboundState.SEALED
        assert sender.num_unacknowledged == 0
        assert sender.try_release_blocks()
        assert not sender.try_release_blocks()
        assert receiver.state is InboundState.SEALED
        assert receiver.try_release_blocks() is None
        assert receiver.due_s is None
        report = sender.report()
        assert report.num_bytes == 3 * LAYOUT.block_bytes
        assert report.num_pieces == 3
        assert report.push_s == pytest.approx(2.5)
        assert report.exposed_s == pytest.approx(1.5)

    @pytest.mark.case("B-009")
    def test_moves_no_byte_when_decode_already_has_the_whole_prompt(self):
        reservation = dataclasses.replace(RESERVATION, num_cached_blocks=3)
        sender, receiver = outbound(reservation), inbound(reservation)
        sender.begin()
        receiver.begin(0.0)
        sender.computed(10, SOURCE_IDS, now_s=0.0, first_token_id=42)
        assert sender.granted() == (Seal("r", 7, 0, first_token_id=42),)
        assert receiver.seal(0, 0.0) == (Sealed("r", 7),)
        sender.sealed(1.0)
        assert sender.report().num_bytes == 0
        assert sender.try_release_blocks()

    @pytest.mark.case("B-031")
    @pytest.mark.parametrize("chunk", [1, 3, 4, 7, 10])
    def test_ships_the_same_bytes_for_every_chunk_size(self, chunk):
        sender = outbound()
        sender.granted()
        num_bytes = 0
        for num_tokens in [*range(chunk, 10, chunk), 10]:
            sender.computed(num_tokens, SOURCE_IDS, now_s=0.0, first_token_id=42)
            while sender.next_piece(0.0):
                num_bytes += sender.sent(0)[0].num_bytes
        assert num_bytes == 3 * LAYOUT.block_bytes
        assert sender.state is OutboundState.SEALING


class TestWhatDecodeRefuses:
    def begun(self):
        receiver = inbound()
        receiver.begin(0.0)
        return receiver

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"epoch": 6}, "epoch 6"),
            ({"request_id": "x"}, "piece of x"),
            ({"index": 1}, "piece 1 came where 0 was next"),
            ({"num_bytes": 8}, "says 8 bytes"),
        ],
    )
    def test_a_piece_of_another_life_or_size_ends_the_handoff(self, change, why):
        receiver = self.begun()
        piece = dataclasses.replace(pieces_of()[0], **change)
        arrival = receiver.arrive(piece, 0.0)
        assert arrival.target_block_ids is None
        assert why in arrival.refusal
        assert [type(message) for message in arrival.messages] == [Abort]
        assert receiver.failure.reason is TransferFailure.REFUSED

    @pytest.mark.parametrize(
        "change",
        [
            {"first_block": 3},
            {"first_block": -1},
            {"first_layer": 2},
            {"first_layer": -1},
            {"num_layers": 0},
            {"num_blocks": 4},
        ],
    )
    def test_a_span_outside_the_reservation_is_not_written(self, change):
        receiver = self.begun()
        piece = pieces_of()[0]
        span = dataclasses.replace(piece.span, **change)
        piece = dataclasses.replace(piece, span=span, num_bytes=span_bytes(LAYOUT, span))
        arrival = receiver.arrive(piece, 0.0)
        assert arrival.target_block_ids is None
        assert "outside the reservation" in arrival.refusal

    def test_the_cached_prefix_is_not_overwritten(self):
        reservation = dataclasses.replace(RESERVATION, num_cached_blocks=1)
        receiver = inbound(reservation)
        receiver.begin(0.0)
        assert "outside" in receiver.arrive(pieces_of()[0], 0.0).refusal

    def test_a_duplicate_ends_the_handoff_because_proven_bytes_were_written_again(self):
        receiver = self.begun()
        piece = pieces_of()[0]
        take(receiver, piece)
        assert "piece 0 came where 1 was next" in receiver.arrive(piece, 0.0).refusal
        renumbered = dataclasses.replace(piece, index=1)
        receiver = self.begun()
        take(receiver, piece)
        assert "another piece covered" in receiver.arrive(renumbered, 0.0).refusal

    def test_a_piece_before_begin_and_after_the_seal_is_thrown_away(self):
        early, late = inbound(), self.begun()
        assert early.arrive(pieces_of()[0], 0.0).target_block_ids is None
        for piece in pieces_of():
            take(late, piece)
        late.seal(2, 0.0)
        arrival = late.arrive(pieces_of()[0], 0.0)
        assert arrival.target_block_ids is None
        assert arrival.refusal == "the handoff is sealed"
        assert late.state is InboundState.SEALED

    def test_a_wrong_checksum_is_never_sealed(self):
        receiver = self.begun()
        first, second = pieces_of()
        _, replies = take(receiver, first, checksum=first.checksum ^ 1)
        assert [type(message) for message in replies] == [PieceAck, Abort]
        assert receiver.arrive(second, 0.0).target_block_ids is None
        (reply,) = receiver.seal(2, 0.0)
        assert (type(reply), reply.reason) == (TransferRefused, TransferFailure.CHECKSUM)
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    @pytest.mark.parametrize("num_sent", [1, 2])
    def test_a_seal_over_missing_pieces_says_how_many_are_missing(self, num_sent):
        receiver = self.begun()
        take(receiver, pieces_of()[0])
        (reply,) = receiver.seal(num_sent, 0.0)
        assert reply.reason is TransferFailure.MISSING_PIECES
        assert f"1 of {num_sent} pieces" in reply.detail
        # The Seal is also the promise not to write: no further wait.
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    def test_a_second_begin_is_refused(self):
        receiver = self.begun()
        (reply,) = receiver.begin(0.0)
        assert reply.reason is TransferFailure.STALE_EPOCH


class TestWhenDecodeFreesBlocks:
    def test_at_once_if_nobody_was_allowed_to_write(self):
        receiver = inbound()
        assert receiver.abort(TransferFailure.ABORTED, "client left", 0.0) == ()
        assert receiver.try_release_blocks() == RESERVATION.block_ids
        assert receiver.try_release_blocks() is None
        (reply,) = receiver.begin(0.0)
        assert isinstance(reply, TransferRefused)

    def test_after_the_writer_acknowledged(self):
        receiver = inbound()
        receiver.begin(0.0)
        (abort,) = receiver.abort(TransferFailure.ABORTED, "client left", 1.0)
        assert abort == Abort("r", 7, TransferFailure.ABORTED, "client left")
        assert receiver.state is InboundState.ABORTING
        assert receiver.try_release_blocks() is None
        assert receiver.abort(TransferFailure.ABORTED, "again", 1.0) == ()
        receiver.fence()
        assert receiver.state is InboundState.CLOSED
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    def test_not_while_our_own_thread_has_a_piece_in_hand(self):
        receiver = inbound()
        receiver.begin(0.0)
        piece = pieces_of()[0]
        receiver.arrive(piece, 0.0)
        receiver.abort(TransferFailure.ABORTED, "client left", 0.0)
        receiver.fence()
        assert receiver.try_release_blocks() is None
        assert receiver.landed(piece, piece.checksum, 0.0) == (PieceAck("r", 7, 0),)
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    def test_when_the_lease_is_over_and_the_link_is_dropped_if_the_writer_stays_silent(self):
        receiver = inbound()
        receiver.begin(0.0)
        assert receiver.due_s == LEASE_S
        assert receiver.tick(LEASE_S - 1) == ()
        (abort,) = receiver.tick(LEASE_S)
        assert abort.reason is TransferFailure.LEASE_EXPIRED
        assert receiver.due_s == LEASE_S + FENCE_TIMEOUT_S
        assert not receiver.is_fence_overdue(LEASE_S)
        assert receiver.is_fence_overdue(LEASE_S + FENCE_TIMEOUT_S)
        assert receiver.try_release_blocks() is None

    def test_when_a_take_fails_only_after_the_writer_is_known_gone(self):
        receiver = inbound()
        receiver.begin(0.0)
        receiver.arrive(pieces_of()[0], 0.0)
        receiver.take_failed("killed", 0.0)
        assert receiver.failure.reason is TransferFailure.LINK_LOST
        assert receiver.try_release_blocks() is None
        receiver.fence()
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    def test_at_once_if_prefill_aborts_because_its_abort_is_the_promise(self):
        receiver = inbound()
        receiver.begin(0.0)
        replies = receiver.peer_aborted(TransferFailure.ABORTED, "deadline", 0.0)
        assert replies == (AbortAck("r", 7),)
        assert receiver.try_release_blocks() == RESERVATION.block_ids

    def test_never_by_an_abort_that_comes_after_the_seal(self):
        receiver = inbound()
        receiver.begin(0.0)
        for piece in pieces_of():
            take(receiver, piece)
        receiver.seal(2, 0.0)
        assert receiver.peer_aborted(TransferFailure.ABORTED, "late", 0.0) == (AbortAck("r", 7),)
        assert receiver.abort(TransferFailure.ABORTED, "late", 0.0) == ()
        assert receiver.tick(99.0) == ()
        assert receiver.state is InboundState.SEALED
        assert receiver.try_release_blocks() is None


class TestHowPrefillEnds:
    def pushing(self):
        sender = outbound()
        sender.granted()
        sender.computed(10, SOURCE_IDS, now_s=0.0, first_token_id=42)
        return sender

    def test_nothing_is_handed_out_before_granted(self):
        sender = outbound()
        sender.begin()
        sender.computed(10, SOURCE_IDS, now_s=0.0, first_token_id=42)
        assert sender.next_piece(0.0) is None
        sender.granted()
        assert sender.next_piece(0.0) is not None
        assert sender.next_piece(0.0) is None

    def test_a_refused_begin_frees_the_source_blocks(self):
        sender = outbound()
        sender.refused(TransferFailure.STALE_EPOCH, "closed")
        assert sender.state is OutboundState.FAILED
        assert sender.failure.reason is TransferFailure.STALE_EPOCH
        assert sender.try_release_blocks()
        assert sender.granted() == ()
        assert sender.computed(10, SOURCE_IDS, now_s=0.0, first_token_id=42) == ()

    @pytest.mark.parametrize("by_peer", [False, True])
    def test_the_promise_waits_for_the_send_in_progress_and_follows_its_header(self, by_peer):
        sender = self.pushing()
        sender.next_piece(0.0)
        end = sender.peer_aborted if by_peer else sender.abort
        assert end(TransferFailure.ABORTED, "client left") == ()
        assert sender.state is OutboundState.ABORTING
        assert not sender.try_release_blocks()
        header, promise = sender.sent(1)
        assert isinstance(header, Piece)
        assert isinstance(promise, AbortAck if by_peer else Abort)
        assert sender.state is OutboundState.FAILED
        assert sender.next_piece(0.0) is None
        assert sender.try_release_blocks()

    def test_crossing_aborts_are_both_answered(self):
        sender = self.pushing()
        sender.next_piece(0.0)
        sender.abort(TransferFailure.ABORTED, "client left")
        sender.peer_aborted(TransferFailure.ABORTED, "client left")
        assert [type(message) for message in sender.sent(1)] == [Piece, Abort, AbortAck]

    def test_an_abort_after_the_end_is_acknowledged_at_once(self):
        sender = outbound()
        sender.refused(TransferFailure.REFUSED, "no")
        assert sender.peer_aborted(TransferFailure.ABORTED, "late") == (AbortAck("r", 7),)

    def test_a_lost_link_says_nothing_more(self):
        sender = self.pushing()
        sender.next_piece(0.0)
        sender.abort(TransferFailure.ABORTED, "client left")
        sender.send_failed("killed")
        assert sender.state is OutboundState.FAILED
        assert sender.failure.reason is TransferFailure.ABORTED
        assert sender.try_release_blocks()

    def test_a_lost_link_fails_an_untouched_handoff(self):
        sender = self.pushing()
        sender.link_lost("stream ended")
        assert sender.failure.reason is TransferFailure.LINK_LOST
        assert sender.try_release_blocks()

    def test_the_deadline_ends_it_and_a_late_sealed_changes_nothing(self):
        sender = self.pushing()
        while sender.next_piece(0.0):
            sender.sent(1)
        assert sender.tick(LEASE_S - 1) == ()
        (abort,) = sender.tick(LEASE_S)
        assert abort.reason is TransferFailure.LEASE_EXPIRED
        sender.sealed(LEASE_S)
        assert sender.state is OutboundState.FAILED

    def test_a_doubled_acknowledgement_counts_once(self):
        sender = self.pushing()
        sender.next_piece(0.0)
        sender.sent(1)
        assert sender.num_unacknowledged == 1
        sender.acknowledged(0)
        sender.acknowledged(0)
        sender.acknowledged(5)
        assert sender.num_unacknowledged == 0


class TestLayersOfAChunkThatIsStillComputed:
    def shipped(self, sender):
        """(layers, blocks) of each piece that is handed out now."""
        spans = []
        while (piece := sender.next_piece(0.0)) is not None:
            spans.append((tuple(piece.span.layers), tuple(piece.span.blocks)))
            sender.sent(0)
        return spans

    def test_they_are_pushed_before_the_chunk_is_done_and_the_rest_after_it(self):
        sender = outbound(max_piece_bytes=10**6)
        sender.granted()

        sender.layers_computed(8, 1, SOURCE_IDS)
        early = self.shipped(sender)
        sender.computed(8, SOURCE_IDS, now_s=1.0, first_token_id=None)
        late = self.shipped(sender)

        assert early == [((0,), (0, 1))]
        assert late == [((1,), (0, 1))]

    def test_each_layer_of_each_block_goes_once_over_several_chunks(self):
        sender = outbound(max_piece_bytes=10**6)
        sender.granted()
        for num_tokens in (6, 10):
            for num_layers in (1, 2):
                sender.layers_computed(num_tokens, num_layers, SOURCE_IDS)
            sender.computed(num_tokens, SOURCE_IDS, now_s=1.0, first_token_id=3)

        spans = self.shipped(sender)

        assert spans == [((0,), (0,)), ((1,), (0,)), ((0,), (1, 2)), ((1,), (1, 2))]
        assert sender.state is OutboundState.SEALING

    def test_too_few_bytes_wait_for_the_end_of_the_chunk(self):
        sender = outbound(max_piece_bytes=10**6, min_piece_bytes=10**6)
        sender.granted()

        sender.layers_computed(8, 1, SOURCE_IDS)
        early = self.shipped(sender)
        sender.computed(8, SOURCE_IDS, now_s=1.0, first_token_id=None)

        assert early == []
        assert self.shipped(sender) == [((0, 1), (0, 1))]

    def test_a_chunk_that_completes_no_block_ships_nothing(self):
        sender = outbound()
        sender.granted()

        sender.layers_computed(3, 2, SOURCE_IDS)
        sender.computed(3, SOURCE_IDS, now_s=1.0, first_token_id=None)

        assert self.shipped(sender) == []

    def test_nothing_is_planned_after_an_abort(self):
        sender = outbound()
        sender.granted()
        sender.abort(TransferFailure.ABORTED, "test")

        sender.layers_computed(8, 1, SOURCE_IDS)

        assert self.shipped(sender) == []


def test_bytes_are_in_flight_from_the_step_that_made_them_to_the_acknowledgement():
    sender = outbound()
    sender.begin()
    assert sender.num_in_flight_bytes == 0
    sender.computed(RESERVATION.num_prompt_tokens, SOURCE_IDS, now_s=0.0, first_token_id=42)
    num_bytes = sender.num_in_flight_bytes
    assert num_bytes == 3 * LAYOUT.block_bytes
    sender.granted()
    piece = sender.next_piece(0.0)
    assert sender.num_in_flight_bytes == num_bytes
    sender.sent(checksum=1)
    assert sender.num_in_flight_bytes == num_bytes
    sender.acknowledged(piece.piece_id.index)
    assert sender.num_in_flight_bytes == num_bytes - span_bytes(LAYOUT, piece.span)
