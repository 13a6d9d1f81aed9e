"""nixl where UCX has nothing but TCP: decode's own worker writes, and a peer may fall silent."""

import threading
import time

import pytest
import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.inbound import InboundState
from kv_transfer.nixl import backend as nixl_backend
from kv_transfer.nixl.agent import INSTALL_HINT, is_installed
from tests.contract.conftest import SEED, Link, wait_until
from tests.contract.handoff_ends import DecodeEnd, reservation_of
from tests.contract.kinds import SOON_S
from tests.contract.peer import Peer, random_cache

pytestmark = pytest.mark.skipif(not is_installed(), reason=INSTALL_HINT)

WHOLE = Span(0, 3, 0, 4)
IDS = (2, 3, 4, 5)
MANY_BLOCKS = 20_000


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    peer = Peer()
    yield peer
    peer.stop()


def test_a_handoff_is_sealed_with_equal_bytes(peer):
    link = Link("nixl", peer)
    reservation = reservation_of((5, 11, 12, 0))
    decode = DecodeEnd(link.receiver, peer.stream, reservation)
    peer.push(reservation, (7, 2, 3, 9))
    decode.run_to_the_end()
    assert decode.state is InboundState.SEALED
    assert peer.result() == ("sealed", None)
    assert torch.equal(link.cache[:, :, [5, 11, 12, 0]], link.source[:, :, [7, 2, 3, 9]])
    peer.close()
    link.close()


def test_bytes_that_a_dead_writer_left_on_the_way_reach_nobody(peer):
    backend = nixl_backend.NixlBackend(host="127.0.0.1")
    blank = random_cache(torch.float32, seed=0, num_blocks=MANY_BLOCKS)
    cache = backend.allocate(blank.nbytes).view(torch.float32).view(blank.shape)
    offer, receiver = backend.offer("link", cache)
    peer.begin("connect", offer, torch.float32, SEED, MANY_BLOCKS)
    receiver.accept(SOON_S)
    peer.answer()
    # 1 a write of many small runs is under way: backwards, so that no two blocks make one run
    blocks = tuple(range(MANY_BLOCKS))
    peer.begin("send", PieceId(1, 0), Span(0, 3, 0, MANY_BLOCKS), blocks, blocks[::-1])
    wait_until(lambda: bool(cache[0, 0, -1].any()))
    # 2 its process dies, decode gives the link up and asks for proof
    peer.kill()
    receiver.close()
    wait_until(receiver.is_writer_gone)
    # 3 what came stays as it is
    was_whole = bool(cache[2, 1, 0].any())
    cache.zero_()
    time.sleep(0.2)
    assert not cache.any()
    assert not was_whole, "the write was over before the kill: the test proved nothing"
    backend.close()


def test_a_write_to_a_silent_receiver_ends_by_its_deadline_and_goodbye_waits(peer, monkeypatch):
    monkeypatch.setattr(nixl_backend, "WRITE_TIMEOUT_S", 0.3)
    offer = peer.offer("nixl")
    peer.begin("accept")
    cache = random_cache(torch.float32, seed=SEED, num_blocks=8)
    sender = nixl_backend.connect(offer, cache, SOON_S)
    peer.answer()
    sender.send(PieceId(1, 0), WHOLE, IDS, IDS)
    # 1 the receiver's process stops in its tracks
    peer.freeze()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match="did not arrive"):
        sender.send(PieceId(1, 1), WHOLE, IDS, IDS)
    assert 0.3 <= time.monotonic() - started_s < SOON_S
    # 2 close returns at once, but the write is not over: a thread waits for its end
    started_s = time.monotonic()
    sender.close()
    assert time.monotonic() - started_s < 0.1
    assert ending_threads()
    # 3 the receiver dies, so the write fails, and the link ends
    peer.kill()
    wait_until(lambda: not ending_threads())
    with pytest.raises(PeerLost, match="closed before"):
        sender.send(PieceId(1, 2), WHOLE, IDS, IDS)


def test_a_write_to_a_receiver_that_died_is_an_error_in_time(peer):
    offer = peer.offer("nixl")
    peer.begin("accept")
    cache = random_cache(torch.float32, seed=SEED, num_blocks=8)
    sender = nixl_backend.connect(offer, cache, SOON_S)
    peer.answer()
    peer.kill()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        sender.send(PieceId(1, 0), WHOLE, IDS, IDS)
    assert time.monotonic() - started_s < SOON_S
    sender.close()


def ending_threads():
    return [thread for thread in threading.enumerate() if thread.name == nixl_backend.END_THREAD]
