"""A link's speed is told from real pieces: robust to stalls, batches of news and idle time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.layout import Dtype, KVLayout
from core.link import PieceId
from core.request import RequestId
from kv_transfer.meter import (
    GROUP_PIECES,
    MIN_PIECE_BYTES,
    NUM_GROUPS,
    NUM_ROUND_TRIPS,
    LinkMeter,
    LinkSpeed,
    piece_sizes,
)
from kv_transfer.outbound import OutboundTransfer
from kv_transfer.plan import PieceSizes, Reservation

MIB = 1 << 20


class Wire:
    """A link with a known speed: serves pieces in order, then the news takes half the latency."""

    def __init__(self, meter, bytes_per_s=1e9, latency_s=1e-3):
        self.meter = meter
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_s = 0.0
        self.num_pieces = 0

    def carry(self, num_bytes, started_s, stall_s=0.0):
        """When the piece is acknowledged."""
        piece_id = PieceId(1, self.num_pieces)
        self.num_pieces += 1
        self.meter.sent(piece_id, num_bytes, started_s)
        self.free_s = max(self.free_s, started_s) + num_bytes / self.bytes_per_s + stall_s
        acknowledged_s = self.free_s + self.latency_s
        self.meter.acknowledged(piece_id, acknowledged_s)
        return acknowledged_s


def test_a_link_that_carried_nothing_claims_nothing():
    assert LinkMeter().speed == LinkSpeed(None, 0, None, 0)


def test_one_piece_gives_a_first_estimate_and_says_that_it_rests_on_one():
    meter = LinkMeter()
    Wire(meter, latency_s=0.0).carry(MIB, started_s=5.0)
    speed = meter.speed
    assert speed.bytes_per_s == pytest.approx(1e9)
    assert speed.latency_s == pytest.approx(MIB / 1e9)
    assert (speed.num_latency_pieces, speed.num_bandwidth_pieces) == (1, 1)


def test_pieces_in_a_row_give_the_links_bandwidth_not_their_round_trips():
    meter = LinkMeter()
    wire = Wire(meter)
    for _ in range(64):
        wire.carry(4 * MIB, started_s=0.0)  # all handed over at once: each waits for the last
    assert meter.speed.bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert meter.speed.num_bandwidth_pieces == 64


def test_idle_time_does_not_slow_the_estimate():
    meter = LinkMeter()
    wire = Wire(meter, latency_s=0.0)
    for piece in range(8):
        wire.carry(MIB, started_s=100.0 * piece)
    assert meter.speed.bytes_per_s == pytest.approx(1e9)


def test_a_stall_moves_the_estimate_no_further_than_its_own_group():
    meter = LinkMeter()
    wire = Wire(meter)
    for piece in range(NUM_ROUND_TRIPS):
        wire.carry(4 * MIB, started_s=0.0, stall_s=1.0 if piece == 10 else 0.0)
    assert meter.speed.bytes_per_s == pytest.approx(1e9, rel=0.02)


def test_acknowledgements_heard_in_one_go_do_not_make_the_link_infinitely_fast():
    meter = LinkMeter()
    num_pieces = 5 * GROUP_PIECES
    for piece in range(num_pieces):
        meter.sent(PieceId(1, piece), MIB, started_s=0.0)
    for piece in range(num_pieces):
        heard_s = (piece // GROUP_PIECES + 1) * GROUP_PIECES * MIB / 1e9
        meter.acknowledged(PieceId(1, piece), heard_s)
    assert meter.speed.bytes_per_s == pytest.approx(1e9, rel=0.3)


def test_latency_is_the_shortest_round_trip():
    meter = LinkMeter()
    wire = Wire(meter, latency_s=1e-3)
    wire.carry(8 * MIB, started_s=0.0)
    wire.carry(4096, started_s=1.0)
    wire.carry(MIB, started_s=2.0)
    assert meter.speed.latency_s == pytest.approx(1e-3 + 4096 / 1e9)


def test_a_link_that_changed_is_seen_as_it_is_now():
    meter = LinkMeter()
    wire = Wire(meter, latency_s=0.0)
    for _ in range(100):
        wire.carry(MIB, started_s=0.0)
    wire.bytes_per_s = 1e8
    for _ in range(NUM_GROUPS * GROUP_PIECES):
        wire.carry(MIB, started_s=0.0)
    assert meter.speed.bytes_per_s == pytest.approx(1e8)
    assert meter.speed.num_bandwidth_pieces == NUM_GROUPS * GROUP_PIECES


def test_only_pieces_that_were_sent_count_and_each_once():
    meter = LinkMeter()
    meter.acknowledged(PieceId(9, 9), 1.0)
    assert meter.speed.num_latency_pieces == 0
    meter.sent(PieceId(1, 0), MIB, started_s=0.0)
    meter.acknowledged(PieceId(1, 0), 1.0)
    meter.acknowledged(PieceId(1, 0), 9.0)
    assert meter.speed.num_latency_pieces == 1
    assert meter.speed.latency_s == 1.0


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 10), st.floats(0, 1)), max_size=80))
def test_whatever_is_carried_the_estimate_is_positive_and_no_faster_than_the_wire(pieces):
    meter = LinkMeter()
    wire = Wire(meter)
    for num_bytes, started_s, stall_s in sorted(pieces, key=lambda piece: piece[1]):
        wire.carry(num_bytes, started_s, stall_s)
    speed = meter.speed
    if pieces:
        assert 0 < speed.bytes_per_s <= 1e9 * 1.01
        assert speed.latency_s >= 1e-3


class TestHowManyBytesAreWorthAPiece:
    """A round trip is worth latency x bandwidth bytes."""

    MOST = 8 * MIB

    def test_a_new_link_starts_with_the_floor(self):
        assert piece_sizes(LinkMeter().speed, self.MOST) == PieceSizes(MIN_PIECE_BYTES, self.MOST)

    def test_a_far_link_waits_for_what_its_round_trip_could_have_carried(self):
        speed = LinkSpeed(2e-3, 64, 1e9, 64)
        assert piece_sizes(speed, self.MOST) == PieceSizes(2_000_000, self.MOST)

    def test_a_link_that_carried_only_small_pieces_keeps_to_the_floor(self):
        meter = LinkMeter()
        wire = Wire(meter, latency_s=1e-3)
        for piece in range(64):
            wire.carry(4096, started_s=1.0 * piece)
        assert piece_sizes(meter.speed, self.MOST).min_bytes == MIN_PIECE_BYTES

    def test_neither_bound_is_over_what_the_backend_takes(self):
        assert piece_sizes(LinkSpeed(1.0, 1, 1e9, 1), MIB) == PieceSizes(MIB, MIB)
        assert piece_sizes(LinkSpeed(None, 0, None, 0), 4096) == PieceSizes(4096, 4096)

    @pytest.mark.parametrize(
        ("latency_s", "num_tokens", "num_pieces"),
        [(1e-4, 128, 5), (8e-3, 128, 1), (8e-3, 512, 2), (1e-4, 512, 15)],
        ids=["small-near", "small-far", "large-far", "large-near"],
    )
    def test_a_small_prompt_goes_as_one_piece_where_a_round_trip_costs_more_than_it_hides(
        self, latency_s, num_tokens, num_pieces
    ):
        sizes = piece_sizes(LinkSpeed(latency_s, 64, 1e9, 64), 16 * MIB)
        assert pieces_of_a_prompt(num_tokens, sizes) == num_pieces


def pieces_of_a_prompt(num_tokens, sizes):
    """Pieces of a prompt whose layers become ready one by one, each sent as soon as it may be."""
    layout = KVLayout("w", Dtype.FLOAT32, 16, 15, 3, 64)
    ids = tuple(range(layout.num_blocks(num_tokens)))
    transfer = OutboundTransfer(
        Reservation(RequestId("a"), 1, ids, num_prompt_tokens=num_tokens),
        layout=layout,
        backend="memory",
        sizes=sizes,
        deadline_s=60.0,
    )
    transfer.begin()
    transfer.granted()
    num_pieces = 0
    for layer in range(layout.num_layers + 1):
        if layer < layout.num_layers:
            transfer.layers_computed(num_tokens, layer + 1, ids)
        else:
            transfer.computed(num_tokens, ids, 1.0, first_token_id=1)
        while transfer.next_piece(0.0) is not None:
            transfer.sent(0)
            num_pieces += 1
    return num_pieces


def test_a_link_that_is_as_busy_as_it_can_be_shows_it_at_once_and_an_idle_one_does_not():
    meter = LinkMeter()
    assert meter.carried_per_s(100.0) is None
    for index in range(4):
        meter.sent(PieceId(1, index), 1000, 100.0)
        meter.acknowledged(PieceId(1, index), 101.0 + index)
    assert meter.carried_per_s(104.0) == pytest.approx(1000)
    assert meter.carried_per_s(120.0) == pytest.approx(4000 / 20)
    assert meter.carried_per_s(140.0) is None
    meter.sent(PieceId(1, 9), 500, 140.0)
    meter.acknowledged(PieceId(1, 9), 141.0)
    assert meter.carried_per_s(142.0) == pytest.approx(250)
