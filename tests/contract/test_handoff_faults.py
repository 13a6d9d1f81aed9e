"""Whole handoffs over every backend while something goes wrong: nothing unproven is ever served.

Both state machines, the backend and its double for faults run as in the workers; for all but
memory the prefill end is another process. The end of each test is the same question: did the
blocks come back once, and was nothing written into them afterwards?
"""

import contextlib
import time

import pytest
import torch

from core.link import AbortAck, Seal
from kv_transfer.inbound import InboundState
from tests.contract.conftest import Link, wait_until
from tests.contract.faulty import Fault, FaultKind, FaultPlan, Step
from tests.contract.handoff_ends import DecodeEnd, drain, reservation_of
from tests.contract.kinds import NIXL
from tests.contract.peer import NO_FAULTS, Peer

SOURCE_IDS, TARGET_IDS = (7, 2, 3, 9), (5, 11, 12, 0)
NEW_OWNERS = 7.25
LATE_S = 1.0

KINDS = ["memory", "shm", "torch", NIXL]
IN_PLACE = ["shm", NIXL]


class Scene:
    """One link, one handoff on it, with faults in the peer by `plan`."""

    def __init__(self, kind, peer, plan=NO_FAULTS, num_cached_blocks=0):
        self.link = Link(kind, peer, plan=plan)
        self.peer = self.link.peer
        reservation = reservation_of(TARGET_IDS, num_cached_blocks)
        self.decode = DecodeEnd(self.link.receiver, self.peer.stream, reservation)
        self.peer.push(reservation, SOURCE_IDS, plan)
        self.has_peer = True

    def kill_peer(self):
        self.peer.kill()
        self.has_peer = False

    def run_until_the_second_send_sleeps(self):
        self.decode.run(lambda: len(self.decode.heard) == 2)
        wait_until(lambda: self.peer.num_sends() == 2)

    def close(self):
        if self.has_peer:
            self.peer.close()
        if self.link.kind != "memory":
            drain(self.peer.stream)
        self.link.close()

    def reuse_blocks(self):
        """What another request does once the pool gave it these blocks."""
        self.link.cache[:, :, list(TARGET_IDS)] = NEW_OWNERS

    def are_blocks_untouched(self):
        return bool((self.link.cache[:, :, list(TARGET_IDS)] == NEW_OWNERS).all())

    def heard(self, kind):
        return [message for message in self.decode.heard if isinstance(message, kind)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def peer():
    """A peer of its own: its stream ends with its handoff."""
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
def scene_of():
    """Scenes that are closed when the test ends, however it ends."""
    with contextlib.ExitStack() as stack:

        def make(*arguments):
            scene = Scene(*arguments)
            stack.callback(scene.close)
            return scene

        yield make


SECOND_SEND_SLEEPS = FaultPlan((Fault(Step.SEND, FaultKind.SLEEP, nth=1, seconds=LATE_S),))


def test_a_handoff_without_faults_is_sealed_with_equal_bytes(kind, shared_peer, scene_of):
    scene = scene_of(kind, shared_peer)
    scene.decode.run_to_the_end()
    assert scene.decode.state is InboundState.SEALED
    assert scene.peer.result() == ("sealed", None)
    source = scene.link.source[:, :, list(SOURCE_IDS)]
    assert torch.equal(scene.link.cache[:, :, list(TARGET_IDS)], source)
    assert scene.decode.transfer.try_release_blocks() is None


@pytest.mark.case("B-009")
def test_a_handoff_of_no_byte_is_sealed_and_frees_both_sides(kind, shared_peer, scene_of):
    scene = scene_of(kind, shared_peer, NO_FAULTS, len(TARGET_IDS))
    scene.decode.run_to_the_end()
    assert scene.decode.state is InboundState.SEALED
    assert scene.peer.result() == ("sealed", None)
    assert scene.peer.num_sends() == 0
    assert not scene.link.cache.any()


@pytest.mark.case("B-020")
@pytest.mark.parametrize("nth", [0, 2])
def test_one_flipped_bit_in_one_piece_is_never_served(kind, shared_peer, nth, scene_of):
    scene = scene_of(kind, shared_peer, FaultPlan((Fault(Step.SEND, FaultKind.CORRUPT, nth=nth),)))
    scene.decode.run_to_the_end()
    assert scene.decode.state is InboundState.CLOSED
    assert scene.peer.result() == ("failed", "checksum")
    assert scene.decode.transfer.failure.reason == "checksum"
    assert scene.decode.transfer.try_release_blocks() == TARGET_IDS
    assert scene.decode.transfer.try_release_blocks() is None


@pytest.mark.case("B-020")
@pytest.mark.parametrize("faults", ["last", "all"])
def test_a_dropped_layer_is_refused_at_the_seal(kind, shared_peer, faults, scene_of):
    nth = 2 if faults == "last" else None
    plan = FaultPlan(tuple(Fault(s, FaultKind.DROP, nth) for s in (Step.SEND, Step.PIECE)))
    scene = scene_of(kind, shared_peer, plan)
    scene.decode.run_to_the_end()
    assert scene.heard(Seal)
    assert scene.peer.result() == ("failed", "missing_pieces")
    assert scene.decode.transfer.try_release_blocks() == TARGET_IDS


def test_a_layer_announced_twice_is_refused(shared_peer, scene_of):
    scene = scene_of(
        "shm", shared_peer, FaultPlan((Fault(Step.PIECE, FaultKind.DUPLICATE, nth=1),))
    )
    scene.decode.run_to_the_end()
    assert scene.peer.result() == ("failed", "refused")
    assert scene.decode.transfer.try_release_blocks() == TARGET_IDS


@pytest.mark.case("B-014")
def test_a_writer_that_is_late_after_an_abort_finds_the_blocks_in_quarantine(
    kind, shared_peer, scene_of
):
    scene = scene_of(kind, shared_peer, SECOND_SEND_SLEEPS)
    decode = scene.decode
    # 1 one layer arrived, the send of the next is in progress and sleeps
    scene.run_until_the_second_send_sleeps()
    # 2 the client leaves: prefill is told, and cannot promise anything yet
    decode.abort()
    assert decode.state is InboundState.ABORTING
    assert decode.transfer.try_release_blocks() is None
    # 3 the late write happens, then prefill promises, then the blocks are free
    aborted_s = time.monotonic()
    decode.run_to_the_end()
    assert time.monotonic() - aborted_s > LATE_S / 2
    assert scene.heard(AbortAck)
    assert decode.transfer.try_release_blocks() == TARGET_IDS
    # 4 nothing comes after the promise
    scene.reuse_blocks()
    assert scene.peer.result() == ("failed", "aborted")
    scene.peer.close()
    scene.link.receiver.close()
    wait_until(scene.link.receiver.is_writer_gone)
    assert scene.are_blocks_untouched()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_without_the_quarantine_the_late_write_would_hit_the_next_request(
    kind, shared_peer, scene_of
):
    scene = scene_of(kind, shared_peer, SECOND_SEND_SLEEPS)
    decode = scene.decode
    scene.run_until_the_second_send_sleeps()
    decode.abort()
    scene.reuse_blocks()  # what the pool must never allow
    assert scene.peer.result() == ("failed", "aborted")
    assert not scene.are_blocks_untouched()
    decode.run_to_the_end()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_writer_that_is_late_when_its_link_is_lost_finds_the_blocks_in_quarantine(
    kind, peer, scene_of
):
    scene = scene_of(kind, peer, SECOND_SEND_SLEEPS)
    decode = scene.decode
    scene.run_until_the_second_send_sleeps()
    decode.lose_link()
    # 1 prefill's process lives and has said nothing: no proof, however long it takes
    assert not decode.ask_for_proof()
    assert decode.transfer.try_release_blocks() is None
    assert peer.result() == ("failed", "link_lost")
    assert not decode.ask_for_proof()
    # 2 its sender is closed: the blocks are free, and stay as their next owner leaves them
    peer.close()
    wait_until(decode.ask_for_proof)
    assert decode.transfer.try_release_blocks() == TARGET_IDS
    scene.reuse_blocks()
    time.sleep(0.05)
    assert scene.are_blocks_untouched()


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen and killed"])
def test_a_writer_that_dies_in_the_middle_of_a_send_frees_the_blocks(
    kind, peer, is_frozen, scene_of
):
    scene = scene_of(kind, peer, SECOND_SEND_SLEEPS)
    decode = scene.decode
    scene.run_until_the_second_send_sleeps()
    if is_frozen:
        peer.freeze()
        decode.lose_link()
        assert not decode.ask_for_proof()
        scene.kill_peer()
    else:
        scene.kill_peer()
        decode.lose_link()
    wait_until(decode.ask_for_proof)
    assert decode.transfer.try_release_blocks() == TARGET_IDS
    scene.reuse_blocks()
    time.sleep(LATE_S)
    assert scene.are_blocks_untouched()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Step.SEND, FaultKind.DELAY, nth=1, seconds=0.05),
        Fault(Step.BEGIN, FaultKind.SLEEP, seconds=0.05),
        Fault(Step.PIECE, FaultKind.CORRUPT, nth=1),
        Fault(Step.SEAL, FaultKind.DUPLICATE),
    ],
    ids=lambda fault: f"{fault.step}-{fault.kind}",
)
def test_whatever_happens_both_ends_agree_how_it_ended(kind, shared_peer, fault, scene_of):
    scene = scene_of(kind, shared_peer, FaultPlan((fault,)))
    scene.decode.run_to_the_end()
    is_sealed = scene.decode.state is InboundState.SEALED
    assert is_sealed == (fault.kind is not FaultKind.CORRUPT)
    assert scene.peer.result() == (("sealed", None) if is_sealed else ("failed", "checksum"))


def test_a_send_that_fails_ends_the_link_and_frees_the_blocks(kind, peer, scene_of):
    scene = scene_of(kind, peer, FaultPlan((Fault(Step.SEND, FaultKind.RAISE, nth=1),)))
    scene.decode.run(lambda: len(scene.decode.heard) == 2)
    assert scene.peer.result() == ("failed", "link_lost")
    scene.decode.lose_link()
    scene.peer.close()
    wait_until(scene.decode.ask_for_proof)
    assert scene.decode.transfer.try_release_blocks() == TARGET_IDS
