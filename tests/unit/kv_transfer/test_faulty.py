"""The double for faults does what was ordered, to the call it was ordered for, and no more."""

import pickle
import time

import pytest
import torch

from core.errors import PeerLost
from core.link import Begin, Granted, Piece, PieceId, Seal, Span
from core.request import RequestId
from kv_transfer.memory import MemoryBackend
from tests.contract.faulty import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyBackend,
    FaultyChannel,
    FaultyReceiver,
    FaultySender,
    Step,
    faulty_connect,
)

SPAN, IDS = Span(0, 2, 0, 2), (1, 3)


class Link:
    """An in-process link with faults at both ends, into a blank cache."""

    def __init__(self, *, sender=(), receiver=()):
        self.source = torch.randn(2, 2, 4, 4, 1, 8, generator=torch.Generator().manual_seed(1))
        self.cache = torch.zeros_like(self.source)
        self.memory = MemoryBackend(take_timeout_s=0.05)
        backend = FaultyBackend(self.memory, FaultPlan(tuple(receiver)))
        offer, self.receiver = backend.offer("link", self.cache)
        connect = faulty_connect(self.memory.connect, FaultPlan(tuple(sender)))
        self.sender = connect(offer, self.source, 1.0)
        assert isinstance(self.receiver, FaultyReceiver) and isinstance(self.sender, FaultySender)

    def send(self, index=0):
        return self.sender.send(PieceId(1, index), SPAN, IDS, IDS)

    def has_arrived(self):
        return torch.equal(self.cache[:, :, list(IDS)], self.source[:, :, list(IDS)])


def test_an_empty_plan_changes_nothing():
    link = Link()
    link.receiver.accept(1.0)
    assert link.sender.has_room()
    assert link.sender.max_piece_bytes > 0
    sent = link.send()
    assert link.receiver.take(SPAN, IDS) == sent
    assert link.has_arrived()


def test_only_the_nth_call_is_struck():
    link = Link(sender=[Fault(Step.SEND, FaultKind.RAISE, nth=1)])
    link.send(0)
    with pytest.raises(PeerLost, match="ordered at send"):
        link.send(1)
    link.send(2)


def test_a_corrupt_send_changes_one_bit_of_what_arrives_and_nothing_at_the_source():
    link = Link(sender=[Fault(Step.SEND, FaultKind.CORRUPT)])
    before = link.source.clone()
    sent = link.send()
    assert torch.equal(link.source, before)
    assert link.receiver.take(SPAN, IDS) != sent
    wrong = (link.cache[:, :, list(IDS)] != link.source[:, :, list(IDS)]).sum()
    assert wrong == 1


def test_a_dropped_send_says_the_checksum_of_what_never_left():
    link = Link(sender=[Fault(Step.SEND, FaultKind.DROP)])
    dropped = link.send()
    with pytest.raises(PeerLost):
        link.receiver.take(SPAN, IDS)
    assert dropped == link.send()


def test_a_duplicate_send_leaves_twice():
    link = Link(sender=[Fault(Step.SEND, FaultKind.DUPLICATE)])
    sent = link.send()
    assert link.receiver.take(SPAN, IDS) == sent
    assert link.receiver.take(SPAN, IDS) == sent


@pytest.mark.parametrize("kind", [FaultKind.SLEEP, FaultKind.DELAY])
def test_sleep_and_delay_hold_the_call_up(kind):
    link = Link(sender=[Fault(Step.SEND, kind, seconds=0.02)])
    started_s = time.monotonic()
    link.send()
    assert time.monotonic() - started_s >= 0.02


def test_a_receiver_can_lose_or_spoil_a_piece():
    link = Link(
        receiver=[Fault(Step.TAKE, FaultKind.DROP, 0), Fault(Step.TAKE, FaultKind.CORRUPT, 1)]
    )
    sent = [link.send(index) for index in range(3)]
    link.receiver.take(SPAN, IDS)
    assert not link.cache.any()
    assert link.receiver.take(SPAN, IDS) == sent[1] ^ 1
    assert link.receiver.take(SPAN, IDS) == sent[2]


def test_a_dropped_close_leaves_the_link_open():
    link = Link(receiver=[Fault(Step.CLOSE, FaultKind.DROP)])
    link.receiver.close()
    assert not link.receiver.is_writer_gone()
    link.receiver.close()
    assert link.receiver.is_writer_gone()


def test_messages_are_dropped_doubled_and_changed_and_keep_their_order():
    sent = []
    plan = FaultPlan(
        (
            Fault(Step.BEGIN, FaultKind.DUPLICATE),
            Fault(Step.PIECE, FaultKind.CORRUPT),
            Fault(Step.SEAL, FaultKind.DROP),
        )
    )
    channel = FaultyChannel(sent.append, plan)
    request_id = RequestId("r")
    piece = Piece(request_id, 1, 0, SPAN, 1024, 6)
    for message in (Begin(request_id, 1), piece, Seal(request_id, 1, 1, 0), Granted(request_id, 1)):
        channel.send(message)
    assert [type(message).__name__ for message in sent] == ["Begin", "Begin", "Piece", "Granted"]
    assert sent[2].checksum == 7


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (Step.CLOSE, FaultKind.CORRUPT),
        (Step.ACCEPT, FaultKind.DROP),
        (Step.SEAL, FaultKind.CORRUPT),
        (Step.ACKNOWLEDGE, FaultKind.RAISE),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(step, kind):
    with pytest.raises(ValueError, match="cannot"):
        Fault(step, kind)


def test_a_plan_travels_to_another_process():
    plan = FaultPlan((Fault(Step.SEND, FaultKind.SLEEP, nth=None, seconds=0.5),))
    assert pickle.loads(pickle.dumps(plan)) == plan
