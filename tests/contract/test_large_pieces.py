"""Pieces that do not fit a staging buffer, over gloo: straight from cache to cache."""

import threading
import time

import pytest
import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.pages import HostPages
from kv_transfer.torch_backend import TorchBackend
from tests.contract.conftest import SEED, wait_until
from tests.contract.kinds import SOON_S
from tests.contract.peer import random_cache

# A row of so many blocks is long enough for a message of its own.
NUM_BLOCKS = 1100
NUM_SLOTS = 3
WHOLE = Span(0, 3, 0, NUM_BLOCKS)
SMALL = Span(1, 1, 0, 2)
RUN = tuple(range(NUM_BLOCKS))
SCATTERED = RUN[::-1]


class LargeLink:
    def __init__(self, peer, take_timeout_s=SOON_S):
        self.peer = peer
        self.source = random_cache(torch.float32, seed=SEED, num_blocks=NUM_BLOCKS)
        self.backend = TorchBackend(
            host="127.0.0.1",
            slot_bytes=64 * 1024,
            num_slots=NUM_SLOTS,
            take_timeout_s=take_timeout_s,
        )
        storage = self.backend.allocate(self.source.nbytes)
        self.cache = storage.view(torch.float32).view(self.source.shape)
        offer, self.receiver = self.backend.offer("link", self.cache)
        peer.begin("connect", offer, torch.float32, SEED, NUM_BLOCKS)
        self.receiver.accept(SOON_S)
        peer.answer()
        self.num_sent = 0

    def send(self, span, source_ids, target_ids):
        """The piece's name and checksum."""
        piece_id = PieceId(1, self.num_sent)
        self.num_sent += 1
        return piece_id, self.peer.send(piece_id, span, source_ids, target_ids)

    def carry(self, span, source_ids, target_ids):
        piece_id, sent = self.send(span, source_ids, target_ids)
        taken = self.receiver.take(span, target_ids)
        self.peer.acknowledge(piece_id)
        assert taken == sent == HostPages(self.source).checksum(span, source_ids)

    def arrived(self, span, source_ids, target_ids):
        layers = slice(span.layers.start, span.layers.stop)
        return torch.equal(
            self.cache[layers][:, :, list(target_ids)], self.source[layers][:, :, list(source_ids)]
        )

    def close(self):
        self.receiver.close()
        self.backend.close()


@pytest.fixture
def link(shared_peer):
    link = LargeLink(shared_peer)
    yield link
    shared_peer.close()
    link.close()


@pytest.mark.parametrize("target_ids", [RUN, SCATTERED], ids=["into-runs", "into-scattered"])
@pytest.mark.parametrize("source_ids", [RUN, SCATTERED], ids=["from-runs", "from-scattered"])
def test_bytes_arrive_exactly_whatever_the_block_ids(link, source_ids, target_ids):
    link.carry(WHOLE, source_ids, target_ids)
    assert link.arrived(WHOLE, source_ids, target_ids)


def test_short_rows_share_messages_and_nothing_else_changes(link):
    span, source_ids, target_ids = Span(0, 3, 0, 100), RUN[200:300], SCATTERED[50:150]
    link.carry(span, source_ids, target_ids)
    assert link.arrived(span, source_ids, target_ids)
    others = sorted(set(RUN) - set(target_ids))
    assert not link.cache[:, :, others].any()


def test_small_and_large_pieces_take_turns_on_one_link(link):
    for _ in range(2 * NUM_SLOTS):
        link.carry(SMALL, (7, 3), (5, 6))
        link.carry(WHOLE, RUN, SCATTERED)
    # 1 also when several are under way
    pieces = [(SMALL, (1, 2), (8, 9)), (SMALL, (4, 5), (3, 1)), (WHOLE, RUN, SCATTERED)]
    sent = [link.send(*piece) for piece in pieces if link.peer.has_room()]
    assert len(sent) == len(pieces)
    assert not link.peer.has_room()
    for (span, _, target_ids), (piece_id, checksum) in zip(pieces, sent, strict=True):
        assert link.receiver.take(span, target_ids) == checksum
        link.peer.acknowledge(piece_id)
    assert link.peer.has_room()


def test_a_large_piece_takes_the_room_of_all_the_staging_buffers_that_it_would_fill(link):
    piece_id, _ = link.send(WHOLE, RUN, RUN)
    assert not link.peer.has_room()
    link.receiver.take(WHOLE, RUN)
    link.peer.acknowledge(piece_id)
    assert link.peer.has_room()


def test_a_fenced_piece_is_written_nowhere_and_the_next_arrives(link):
    piece_id, _ = link.send(WHOLE, RUN, RUN)
    link.receiver.take(WHOLE, None)
    link.peer.acknowledge(piece_id)
    assert not link.cache.any()
    link.carry(WHOLE, SCATTERED, RUN)


def half_taken(link):
    """A take that has one layer and waits for two more; its error, when it comes."""
    link.send(Span(0, 1, 0, NUM_BLOCKS), RUN, RUN)
    errors = []

    def take():
        try:
            link.receiver.take(WHOLE, RUN)
        except PeerLost as error:
            errors.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    wait_until(lambda: bool(link.cache[0, 1, -1].any()))
    assert not link.receiver.is_writer_gone()
    return taking, errors


def test_a_sender_that_dies_in_the_middle_is_an_error_and_writes_no_more(own_peer):
    link = LargeLink(own_peer)
    taking, errors = half_taken(link)
    own_peer.kill()
    taking.join(SOON_S)
    assert len(errors) == 1
    link.receiver.close()
    assert link.receiver.is_writer_gone()
    link.close()


def test_a_piece_that_is_never_whole_is_an_error_in_time_and_its_rest_is_written_nowhere(own_peer):
    link = LargeLink(own_peer, take_timeout_s=0.5)
    started_s = time.monotonic()
    taking, errors = half_taken(link)
    taking.join(SOON_S)
    assert 0.4 < time.monotonic() - started_s < SOON_S
    # 1 the error holds its traceback, and with it all that `take` knew
    assert len(errors) == 1
    link.receiver.close()
    assert link.receiver.is_writer_gone()
    # 2 the rest comes late, and finds nobody
    link.cache.zero_()
    own_peer.begin("send", PieceId(1, 1), Span(1, 2, 0, NUM_BLOCKS), RUN, RUN)
    time.sleep(0.2)
    assert not link.cache.any()
    link.close()
