"""A pair over NCCL, as far as its double goes: deadlines, aborts, what each end says of them."""

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.cuda import nccl_pair
from kv_transfer.cuda.double import GroupDouble
from kv_transfer.cuda.nccl import NcclReceiver, NcclSender
from kv_transfer.cuda.nccl_pair import Pair, build_pair
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec

HOST = "127.0.0.1"
CPU = torch.device("cpu")
SHAPE = (2, 2, 6, 4, 1, 8)
IDS, SPAN = (4, 1), Span(0, 2, 0, 2)


class Groups:
    """Makes doubles and keeps what it made, rank by rank."""

    def __init__(self):
        self.made = {}

    def __call__(self, store, rank):
        self.made[rank] = GroupDouble(store, rank)
        return self.made[rank]

    def are_aborted(self):
        return all(group.is_aborted for group in self.made.values())


@pytest.fixture
def store():
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def groups():
    return Groups()


def spec_of(store, num_slots=2):
    return LinkSpec(HOST, store.port, "link", "cuda", num_slots, 4096)


def linked(store, groups, take_timeout_s=0.2):
    """Both ends of a link in this process."""
    source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    spec, target = spec_of(store), torch.zeros(SHAPE)
    receiver = NcclReceiver(store, spec, target, take_timeout_s, open_group=groups)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(receiver.accept, 5.0)
        sender = NcclSender(spec, source, 5.0, open_group=groups)
        accepted.result()
    return sender, source, receiver, target


def wait_until(is_true):
    until_s = time.monotonic() + 5.0
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_silent_sender_ends_the_take_in_time_and_the_link_with_an_abort(store, groups):
    sender, source, receiver, target = linked(store, groups)
    # 1 one piece arrives
    checksum = sender.send(PieceId(1, 0), SPAN, IDS, IDS)
    assert receiver.take(SPAN, IDS) == checksum
    assert torch.equal(target[:, :, list(IDS)], source[:, :, list(IDS)])
    # 2 the next never comes
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"silent for 0\.2 s"):
        receiver.take(SPAN, IDS)
    assert time.monotonic() - started_s < 2.0
    # 3 both ends give the group up; nothing can be taken or sent any more
    receiver.close()
    sender.close()
    wait_until(groups.are_aborted)
    assert receiver.is_writer_gone()
    with pytest.raises(PeerLost, match="closed"):
        receiver.take(SPAN, IDS)
    with pytest.raises(PeerLost, match="closed before"):
        sender.send(PieceId(1, 1), SPAN, IDS, IDS)


def test_a_piece_of_another_size_than_announced_is_an_error(store, groups):
    sender, _, receiver, _ = linked(store, groups)
    sender.send(PieceId(1, 0), SPAN, IDS, IDS)
    with pytest.raises(PeerLost, match="bytes were sent"):
        receiver.take(Span(0, 1, 0, 2), IDS)
    sender.close()
    receiver.close()
    wait_until(groups.are_aborted)


def test_a_take_keeps_the_group_until_it_returns(store, groups):
    sender, _, receiver, _ = linked(store, groups, take_timeout_s=0.3)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(receiver.take, SPAN, IDS)
        wait_until(receiver._taking.locked)
        receiver.close()
        assert not receiver.is_writer_gone()
        assert isinstance(taken.exception(5.0), PeerLost)
    assert receiver.is_writer_gone()
    sender.close()
    wait_until(groups.are_aborted)


def test_an_end_whose_peer_never_comes_is_an_error_in_time_and_makes_no_group(store, groups):
    with pytest.raises(PeerLost, match=r"no pair was built within 0\.2 s"):
        build_pair(spec_of(store), DECODE, CPU, 0.2, groups)
    assert groups.made == {}


def test_a_link_that_was_never_built_leaves_nothing_in_the_store(store, groups):
    receiver = NcclReceiver(store, spec_of(store), torch.zeros(SHAPE), 0.2, open_group=groups)
    with pytest.raises(PeerLost):
        receiver.accept(0.1)
    assert store.list_keys() == []
    receiver.close()
    assert receiver.is_writer_gone()


class Stuck:
    """NCCL whose set-up waits for a peer that died in the middle of it."""

    def __init__(self):
        self.may_return = threading.Event()
        self.is_aborted = False

    def __call__(self, store, rank):
        return self

    def send(self, tensors, peer, tag):
        self.may_return.wait(10.0)
        return self

    def is_completed(self):
        return True

    def wait(self):
        """It ended well."""

    def abort(self):
        self.is_aborted = True


def test_a_group_that_is_built_too_late_is_given_up_and_aborted_when_it_comes(store):
    stuck = Stuck()
    store.set("link/here/0", "")
    with pytest.raises(PeerLost, match=r"within 0\.2 s"):
        build_pair(spec_of(store), PREFILL, CPU, 0.2, stuck)
    assert not stuck.is_aborted
    stuck.may_return.set()
    wait_until(lambda: stuck.is_aborted)


def test_buffers_live_until_the_abort_is_over():
    class SlowAbort:
        def __init__(self):
            self.may_end = threading.Event()

        def abort(self):
            self.may_end.wait(10.0)

    class Buffer:
        """As much of a tensor as counts here."""

    group, gone = SlowAbort(), threading.Event()
    buffer = Buffer()
    weakref.finalize(buffer, gone.set)
    Pair(group, "link").abort(buffer)
    del buffer
    assert not gone.is_set()
    group.may_end.set()
    assert gone.wait(5.0)


def test_a_watchdog_that_would_end_the_process_is_forbidden(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    nccl_pair.forbid_watchdog()
    assert nccl_pair.os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


class Options:
    def __init__(self, is_high_priority_stream):
        assert is_high_priority_stream, "steps would share streams with a receive that waits"
        self.config = type("Config", (), {})()


class NcclRecorder:
    """The entry points of torch's NCCL that a group is made with."""

    Options = Options

    def __init__(self, store, rank, size, options):
        self.made_with = (store, rank, size)
        self.options = options


def test_a_group_takes_a_bounded_number_of_blocks_from_its_card(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setattr(nccl_pair.distributed, "ProcessGroupNCCL", NcclRecorder, raising=False)
    group = nccl_pair.open_nccl("store", PREFILL)
    assert group.made_with == ("store", PREFILL, 2)
    assert (group.options.config.min_ctas, group.options.config.max_ctas) == (1, 4)
    assert group.options._timeout == timedelta(seconds=nccl_pair.ABORT_TIMEOUT_S)
    assert nccl_pair.os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
