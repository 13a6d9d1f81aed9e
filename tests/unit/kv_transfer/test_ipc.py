"""Writing into another process's card: what is handed over, to whom, and when a writer is gone."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.cuda import card, ipc, mapping
from kv_transfer.cuda.double import SharedMemoryDouble
from kv_transfer.cuda.lane import Lane

HOST = "127.0.0.1"
SHAPE = (2, 2, 6, 4, 1, 8)
NUM_BYTES = torch.Size(SHAPE).numel() * 4
IDS, SPAN = (4, 1), Span(0, 2, 0, 2)
NEEDS_CARD = "torch sees no CUDA device"


class LaneDouble:
    """A card that is busy, idle or broken, as it is told."""

    def __init__(self):
        self.is_busy = False
        self.failure = None

    def working(self):
        return nullcontext()

    def is_idle(self):
        if self.failure is not None:
            raise self.failure
        return not self.is_busy

    def is_idle_within(self, timeout_s):
        return self.is_idle()


class Scene:
    """Both ends of a link in one process, whose sender works on a lane double."""

    def __init__(self):
        self.memory = SharedMemoryDouble()
        self.backend = ipc.IpcBackend(host=HOST, memory=self.memory)
        self.cache = self.backend.allocate(NUM_BYTES).view(torch.float32).view(SHAPE)
        self.source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        offer, self.receiver = self.backend.offer("link", self.cache)
        with ThreadPoolExecutor(1) as thread:
            accepted = thread.submit(self.receiver.accept, 5.0)
            self.sender = ipc.connect(offer, self.source, 5.0, memory=SharedMemoryDouble())
            accepted.result()
        self.lane = self.sender._lane = LaneDouble()


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    scene.lane.is_busy, scene.lane.failure = False, None
    scene.sender.close()
    scene.backend.close()
    scene.memory.close()


def wait_until(is_true):
    until_s = time.monotonic() + 5.0
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_sender_says_goodbye_only_when_its_card_is_done(scene):
    checksum = scene.sender.send(PieceId(1, 0), SPAN, IDS, IDS)
    assert scene.receiver.take(SPAN, IDS) == checksum
    # 1 a copy finds no end: the link is lost, and blocks stay in quarantine
    scene.lane.is_busy = True
    with pytest.raises(PeerLost, match="was not copied"):
        scene.sender.send(PieceId(1, 1), SPAN, IDS, IDS)
    scene.receiver.close()
    scene.sender.close()
    time.sleep(0.05)
    assert not scene.receiver.is_writer_gone()
    # 2 it ends after all
    scene.lane.is_busy = False
    wait_until(scene.receiver.is_writer_gone)
    assert scene.sender._target is None


def test_a_card_that_has_failed_proves_nothing_while_its_process_lives(scene, caplog):
    scene.lane.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    scene.receiver.close()
    scene.sender.close()
    assert "ends without a goodbye" in caplog.text
    assert not scene.receiver.is_writer_gone()
    scene.sender._lifeline.close()


def test_memory_that_cannot_be_mapped_is_an_error_and_the_writer_is_gone():
    memory = SharedMemoryDouble()
    backend = ipc.IpcBackend(host=HOST, memory=memory)
    cache = backend.allocate(NUM_BYTES).view(torch.float32).view(SHAPE)
    offer, receiver = backend.offer("link", cache)
    memory.close()
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(receiver.accept, 5.0)
        with pytest.raises(PeerLost, match="cannot be mapped"):
            ipc.connect(offer, torch.zeros(SHAPE), 5.0, memory=SharedMemoryDouble())
        assert isinstance(accepted.exception(5.0), PeerLost)
    receiver.close()
    assert receiver.is_writer_gone()
    backend.close()


def test_a_card_s_memory_travels_as_text_and_is_shared_once(monkeypatch):
    handle, counter, shares = bytes(range(66)), b"/torch_17_4", []

    def share():
        shares.append(1)
        return (3, handle, 4096, 512, counter, 7, bytes(64), True)

    storage = SimpleNamespace(data_ptr=lambda: 0x7F00, _share_cuda_=share)
    cache = SimpleNamespace(untyped_storage=lambda: storage, device=torch.device("cuda", 3))
    monkeypatch.setattr(mapping, "card_id", lambda device: f"uuid-{device.index}")
    memory = mapping.CudaMemory()
    parameters = memory.export(cache)
    assert memory.export(cache) == parameters
    assert len(shares) == 1
    assert all(isinstance(value, str) for value in parameters.values())
    mapped = []
    monkeypatch.setattr(mapping, "local_card", {"uuid-3": torch.device("cpu", 0)}.__getitem__)
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_new_shared_cuda",
        lambda *arguments: mapped.append(arguments) or torch.UntypedStorage(4096),
    )
    assert mapping.CudaMemory().map(parameters).nbytes == 4096
    # in this process the card has another number; no event is waited for
    assert mapped == [(0, handle, 4096, 512, counter, 7, bytes(64), False)]


@pytest.fixture
def three_cards(monkeypatch):
    """Cards a, b and c; a reaches b."""
    properties = [SimpleNamespace(uuid=f"uuid-{name}") for name in "abc"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) == (0, 1)
    )


@pytest.mark.usefixtures("three_cards")
def test_cards_are_named_by_uuid_and_a_worker_tells_which_it_can_write_to():
    a, b, c = (card.card_id(torch.device("cuda", index)) for index in range(3))
    assert a.startswith("uuid-a/ipc:")
    assert card.reachable_cards(torch.device("cuda", 0)) == (a, b)
    assert card.reachable_cards(torch.device("cuda", 2)) == (c,)
    assert card.local_card(c) == torch.device("cuda", 2)
    with pytest.raises(PeerLost, match="uuid-d"):
        card.local_card("uuid-d/ipc:1")


def test_a_lane_on_a_cpu_has_nothing_to_wait_for():
    lane = Lane(torch.device("cpu"), torch.device("cpu"))
    with lane.working():
        pass
    assert lane.is_idle() and lane.is_idle_within(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CARD)
def test_a_lane_waits_for_its_own_work_and_for_no_other_lane_s():
    device = torch.device("cuda", 0)
    busy, other = Lane(device), Lane(device)
    with busy.working():
        torch.cuda._sleep(2_000_000_000)
    with other.working():
        ones = torch.ones(4, device=device)
        assert int(ones.sum()) == 4
    assert other.is_idle_within(1.0)
    assert not busy.is_idle()
    assert busy.is_idle_within(30.0)
