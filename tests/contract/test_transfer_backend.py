"""What every transfer backend has to do; runs against each of them.

memory lives in this process; the others have their sender in a second one. Kinds with a card run
where torch sees one (`pytest -m gpu`); their doubles run everywhere.
"""

import gc
import os
import socket
import struct
import threading
import time

import pytest
import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.pages import HostPages
from tests.contract.conftest import (
    NUM_SOURCE_BLOCKS,
    NUM_TARGET_BLOCKS,
    SEED,
    Link,
    MemorySide,
    make_backend,
    wait_until,
)
from tests.contract.faulty import Fault, FaultKind, FaultPlan, Step
from tests.contract.kinds import IPC, IPC_PEER, NCCL, NIXL, NIXL_CARD, SOON_S
from tests.contract.peer import PeerRaised
from tests.segments import assert_no_orphans, segments

CARDS = [IPC, IPC_PEER, NCCL, NIXL_CARD]
KINDS = ["memory", "shm", "torch", NIXL, "nccl-double", "ipc-double", *CARDS]
BETWEEN_PROCESSES = ["shm", "torch", NIXL, *CARDS]
IN_PLACE = ["shm", NIXL, "ipc-double", IPC, IPC_PEER, NIXL_CARD]
TWO_SIDED = ("torch", "nccl")


def bytes_of(cache, block_ids, span):
    layers = cache[span.layers.start : span.layers.stop]
    return layers[:, :, list(block_ids)].contiguous().view(torch.uint8)


WHOLE = Span(0, 3, 0, 4)
IDS = (2, 3, 4, 5)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def link(kind, shared_peer):
    link = Link(kind, shared_peer)
    yield link
    link.peer.close()
    link.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [((2, 3, 4, 5), (8, 9, 10, 11)), ((9, 0, 4, 3), (13, 1, 0, 6)), ((7, 1, 2, 3), (4, 5, 6, 7))],
    ids=["runs", "scattered", "mixed"],
)
def test_bytes_arrive_exactly_and_nothing_else_changes(
    kind, shared_peer, dtype, source_ids, target_ids
):
    link = Link(kind, shared_peer, dtype)
    for index, span in enumerate([Span(0, 1, 0, 4), Span(1, 2, 0, 4)]):
        sent = link.peer.send(PieceId(1, index), span, source_ids, target_ids)
        assert link.receiver.take(span, target_ids) == sent
        link.peer.acknowledge(PieceId(1, index))
    arrived = bytes_of(link.cache, target_ids, WHOLE)
    assert torch.equal(arrived, bytes_of(link.source, source_ids, WHOLE))
    others = [block for block in range(NUM_TARGET_BLOCKS) if block not in target_ids]
    assert not link.cache[:, :, others].any()
    link.peer.close()
    link.close()


def test_the_checksum_does_not_depend_on_block_ids(link):
    first = link.peer.send(PieceId(1, 0), WHOLE, IDS, (0, 1, 2, 3))
    second = link.peer.send(PieceId(1, 1), WHOLE, IDS, (13, 5, 9, 4))
    assert first == second
    assert link.receiver.take(WHOLE, (0, 1, 2, 3)) == first
    assert link.receiver.take(WHOLE, (13, 5, 9, 4)) == first


@pytest.mark.case("B-166")
def test_pieces_of_two_requests_may_be_in_flight_in_turns(link):
    targets = {1: (0, 1, 2, 3), 2: (7, 6, 5, 4)}
    sources = {1: (0, 1, 2, 3), 2: (9, 8, 7, 6)}
    spans = [Span(0, 2, 0, 4), Span(2, 1, 0, 4)]
    order = [(epoch, index) for index in range(2) for epoch in (1, 2)]
    sent = [
        link.peer.send(PieceId(epoch, index), spans[index], sources[epoch], targets[epoch])
        for epoch, index in order
    ]
    taken = []
    for epoch, index in order:
        taken.append(link.receiver.take(spans[index], targets[epoch]))
        link.peer.acknowledge(PieceId(epoch, index))
    assert taken == sent
    for epoch in (1, 2):
        arrived = bytes_of(link.cache, targets[epoch], WHOLE)
        assert torch.equal(arrived, bytes_of(link.source, sources[epoch], WHOLE))


def test_many_more_pieces_than_staging_buffers_pass_one_after_the_other(link):
    for index in range(20):
        target_ids = ((index % 7) * 2, (index % 7) * 2 + 1)
        span = Span(index % 3, 1, 0, 2)
        assert link.peer.has_room()
        sent = link.peer.send(PieceId(1, index), span, (index % 10, 9 - index % 10), target_ids)
        assert link.receiver.take(span, target_ids) == sent
        link.peer.acknowledge(PieceId(1, index))


def test_a_fenced_piece_is_taken_off_the_link_and_written_nowhere(link):
    link.peer.send(PieceId(1, 0), WHOLE, IDS, (0, 1, 2, 3))
    before = link.cache.clone()
    link.receiver.take(WHOLE, None)
    assert torch.equal(link.cache, before)
    after = link.peer.send(PieceId(2, 0), WHOLE, (6, 7, 8, 9), (4, 5, 6, 7))
    assert link.receiver.take(WHOLE, (4, 5, 6, 7)) == after


def test_a_byte_that_changed_on_the_way_gives_another_checksum(kind, shared_peer):
    plan = FaultPlan((Fault(Step.SEND, FaultKind.CORRUPT),))
    link = Link(kind, shared_peer, plan=plan)
    sent = link.peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
    assert link.receiver.take(WHOLE, IDS) != sent
    link.peer.acknowledge(PieceId(1, 0))
    # 1 the next piece is whole again, so it was the fault and nothing else
    sent = link.peer.send(PieceId(1, 1), WHOLE, IDS, IDS)
    assert link.receiver.take(WHOLE, IDS) == sent
    link.peer.close()
    link.close()


def test_a_closed_receiver_ends_the_link_for_both_and_proves_it(link):
    assert not link.receiver.is_writer_gone()
    link.receiver.close()
    link.receiver.close()
    with pytest.raises(PeerLost):
        link.receiver.take(WHOLE, IDS)
    link.peer.close()
    wait_until(link.receiver.is_writer_gone)


def test_a_sender_that_never_comes_is_an_error_in_time(kind):
    backend = make_backend(kind)
    cache = backend.allocate(14 * 3 * 2 * 256).view(torch.float32).view(3, 2, 14, 4, 2, 8)
    _, receiver = backend.offer("link", cache)
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        receiver.accept(0.3)
    assert time.monotonic() - started_s < SOON_S
    receiver.close()
    assert receiver.is_writer_gone()
    backend.close()


def test_an_offer_that_was_withdrawn_is_an_error_in_time(kind, shared_peer):
    backend = make_backend(kind)
    cache = backend.allocate(14 * 3 * 2 * 256).view(torch.float32).view(3, 2, 14, 4, 2, 8)
    offer, receiver = backend.offer("link", cache)
    receiver.close()
    backend.close()
    peer = MemorySide(backend) if kind == "memory" else shared_peer
    with pytest.raises((PeerRaised, PeerLost), match="lost"):
        peer.connect(offer, torch.float32, SEED, NUM_SOURCE_BLOCKS, 1.0)


def test_nothing_is_left_after_close(kind, shared_peer):
    def one_life(name):
        link = Link(kind, shared_peer, name=name)
        link.peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
        link.receiver.take(WHOLE, IDS)
        link.peer.acknowledge(PieceId(1, 0))
        link.peer.send(PieceId(1, 1), WHOLE, IDS, IDS)
        link.peer.close()
        link.close()

    def resources():
        here = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        return here, shared_peer.num_open()

    def settled():
        """What does not change any more: groups of NCCL end in threads of their own."""
        gc.collect()
        seen = [None, resources()]
        while seen[-1] != seen[-2]:
            time.sleep(0.05)
            seen.append(resources())
        return seen[-1]

    one_life("warm-up")
    known = segments()
    before = settled()
    for index in range(3):
        one_life(f"life-{index}")
    assert settled() == before
    assert_no_orphans(known)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_killed_sender_is_an_error_within_seconds_and_can_write_no_more(kind, own_peer):
    link = Link(kind, own_peer, take_timeout_s=SOON_S / 2)
    killer = threading.Timer(0.2, own_peer.kill)
    killer.start()
    started_s = time.monotonic()
    if kind in TWO_SIDED:
        with pytest.raises(PeerLost):
            link.receiver.take(WHOLE, IDS)
    killer.join()
    link.receiver.close()
    wait_until(link.receiver.is_writer_gone)
    assert time.monotonic() - started_s < SOON_S
    link.close()


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_sender_can_close_at_once_when_the_receiver_was_killed(kind, shared_peer, own_peer):
    offer = own_peer.offer(kind)
    own_peer.begin("accept")
    shared_peer.connect(offer, torch.float32, SEED, NUM_SOURCE_BLOCKS)
    own_peer.answer()
    shared_peer.send(PieceId(1, 0), WHOLE, IDS, (0, 1, 2, 3))
    own_peer.kill()
    started_s = time.monotonic()
    shared_peer.close()
    assert time.monotonic() - started_s < 5.0


def test_a_silent_sender_is_an_error_when_the_time_is_over(own_peer):
    link = Link("torch", own_peer, take_timeout_s=0.5)
    own_peer.freeze()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        link.receiver.take(WHOLE, IDS)
    assert 0.4 < time.monotonic() - started_s < SOON_S
    link.receiver.close()
    assert link.receiver.is_writer_gone()
    link.close()


def test_staging_buffers_are_counted_and_come_back(shared_peer):
    link = Link("torch", shared_peer)
    for index in range(4):
        assert link.peer.has_room()
        link.peer.send(PieceId(1, index), WHOLE, IDS, IDS)
    assert not link.peer.has_room()
    link.receiver.take(WHOLE, IDS)
    link.peer.acknowledge(PieceId(1, 0))
    link.peer.acknowledge(PieceId(1, 0))
    assert link.peer.has_room()
    link.peer.close()
    link.close()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_cache_is_not_free_while_a_writer_in_place_lives(kind, own_peer):
    link = Link(kind, own_peer)
    own_peer.freeze()
    link.receiver.close()
    assert not link.receiver.is_writer_gone()
    own_peer.kill()
    wait_until(link.receiver.is_writer_gone)
    link.close()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_sender_does_not_write_in_place_after_the_link_was_closed(kind, shared_peer):
    link = Link(kind, shared_peer)
    link.receiver.close()
    with pytest.raises(PeerRaised, match="closed before"):
        link.peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
    assert not link.cache.any()
    link.peer.close()
    wait_until(link.receiver.is_writer_gone)
    link.close()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_stranger_without_the_nonce_is_not_let_in(kind, shared_peer):
    backend = make_backend(kind)
    cache = backend.allocate(14 * 3 * 2 * 256).view(torch.float32).view(3, 2, 14, 4, 2, 8)
    offer, receiver = backend.offer("link", cache)
    forged = type(offer)(offer.kind, offer.parameters | {"nonce": "00" * 16})
    shared_peer.begin("connect", forged, torch.float32, SEED, NUM_SOURCE_BLOCKS)
    with pytest.raises(PeerLost):
        receiver.accept(1.0)
    with pytest.raises(PeerRaised, match="did not (hand out|let)"):
        shared_peer.answer()
    receiver.close()
    assert receiver.is_writer_gone()
    backend.close()


def silent(connection):
    return connection


def hangs_up(connection):
    connection.close()


def resets(connection):
    # Over TCP this sends a reset in the place of an orderly end.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def talks_nonsense(connection):
    connection.send(
        b"GET / HTTP/1.1\r\nHost: nobody, really\r\nAccept: */*, whatever it may be\r\n"
    )
    return connection


def stops_half_way(connection):
    connection.send(b"\0" * 3)
    return connection


STRANGERS = (silent, hangs_up, resets, talks_nonsense, stops_half_way)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_strangers_who_come_first_do_not_keep_the_sender_out(kind, shared_peer):
    backend = make_backend(kind)
    cache = backend.allocate(14 * 3 * 2 * 256).view(torch.float32).view(3, 2, 14, 4, 2, 8)
    offer, receiver = backend.offer("link", cache)
    # 1 they are all there before decode looks
    left = [stranger(knock(offer)) for stranger in STRANGERS]
    # 2 the sender comes last and is let in as if it were alone
    shared_peer.begin("connect", offer, torch.float32, SEED, NUM_SOURCE_BLOCKS)
    started_s = time.monotonic()
    receiver.accept(SOON_S)
    assert time.monotonic() - started_s < SOON_S / 2
    shared_peer.answer()
    sent = shared_peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
    assert receiver.take(WHOLE, IDS) == sent
    shared_peer.close()
    receiver.close()
    wait_until(receiver.is_writer_gone)
    backend.close()
    for connection in filter(None, left):
        connection.close()


def knock(offer):
    """A connection to where the sender of an in-place backend is expected."""
    if "address" in offer.parameters and "lifeline_host" not in offer.parameters:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect("\0" + offer.parameters["address"])
        return connection
    address = (offer.parameters["lifeline_host"], int(offer.parameters["lifeline_port"]))
    return socket.create_connection(address)


@pytest.mark.parametrize(
    "kind", ["memory", "shm", NIXL, "ipc-double"]
)  # a rendezvous of gloo ends by its timeout
def test_a_waiting_accept_ends_when_the_link_is_closed(kind):
    backend = make_backend(kind)
    cache = backend.allocate(14 * 3 * 2 * 256).view(torch.float32).view(3, 2, 14, 4, 2, 8)
    _, receiver = backend.offer("link", cache)
    closer = threading.Timer(0.1, receiver.close)
    closer.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        receiver.accept(SOON_S)
    assert time.monotonic() - started_s < 5.0
    closer.join()
    backend.close()


def test_a_dropped_piece_is_an_error_in_time():
    link = Link("memory", None)
    link.backend.drop = (0,)
    link.peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
    with pytest.raises(PeerLost, match="silent"):
        link.receiver.take(WHOLE, IDS)
    link.close()


def test_a_delayed_piece_arrives_late_and_whole():
    link = Link("memory", None)
    link.backend.delay_s = 0.05
    started_s = time.monotonic()
    sent = link.peer.send(PieceId(1, 0), WHOLE, IDS, IDS)
    assert link.receiver.take(WHOLE, IDS) == sent
    assert time.monotonic() - started_s >= 0.05
    assert HostPages(link.cache).checksum(WHOLE, IDS) == sent
    link.close()
