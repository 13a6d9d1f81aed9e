"""A prefill worker that stops: what it has is pushed first, and nothing new is taken."""

import asyncio

import pytest

from core.clock import MonotonicClock
from core.errors import PeerLost, PeerStopping
from core.layout import Dtype, KVLayout
from core.request import Request, RequestId, SamplingParams
from core.tally import Tally
from core.worker import RemoteReservation, Role, WorkerInfo
from engine.block_pool import BlockPool
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker

LAYOUT = KVLayout("w", Dtype.FLOAT32, block_size=4, num_layers=1, num_kv_heads=1, head_dim=8)
LATE_S = 10.0


class SlowLinks:
    """Links on which each handoff fails when the test says so."""

    num_open_transfers = 0
    num_bytes = 0
    statuses = ()
    tally = Tally()

    def loads(self, now_s):
        return []

    def __init__(self):
        self.may_fail = asyncio.Event()

    async def begin(self, request, reservation):
        await self.may_fail.wait()
        raise PeerLost("decode-0", "killed")


@pytest.fixture
async def service():
    info = WorkerInfo(
        name="prefill-0", role=Role.PREFILL, incarnation="1", model="tiny", layout=LAYOUT,
        num_blocks=8, max_context_tokens=32, vocab_size=512, max_num_sequences=0, kernels="none",
    )  # fmt: skip
    worker = PrefillWorker(BlockPool(8, 4), block_size=4, max_batch_tokens=8, max_waiting=4)
    return PrefillService(info, worker, None, SlowLinks(), device=None, clock=MonotonicClock())


def prefill(service, request_id):
    """A prompt on its way through the service, as a task."""
    request = Request(RequestId(request_id), (1, 2, 3), SamplingParams(), 1e9)
    reservation = RemoteReservation("decode-0", "d:1", "1", 1, (0,), 0, 0, request.prompt_digest)

    async def run():
        async for _ in service._prefill(request, reservation):
            pass

    return asyncio.create_task(run())


async def test_it_waits_for_what_it_has_and_takes_nothing_new(service):
    first = prefill(service, "a")
    await asyncio.sleep(0)
    draining = asyncio.create_task(service.drain(LATE_S))
    await asyncio.sleep(0)
    assert service.status().is_draining
    with pytest.raises(PeerStopping, match="prefill-0"):
        await prefill(service, "b")
    assert not draining.done()
    service._links.may_fail.set()
    with pytest.raises(PeerLost, match="killed"):
        await first
    async with asyncio.timeout(LATE_S):
        await draining


async def test_it_waits_no_longer_than_its_limit(service):
    first = prefill(service, "a")
    await asyncio.sleep(0)
    async with asyncio.timeout(LATE_S):
        await service.drain(0.01)
    assert not first.done()
    first.cancel()


async def test_an_idle_one_is_done_at_once(service):
    async with asyncio.timeout(1.0):
        await service.drain(LATE_S)


async def test_prompts_that_wait_for_the_device_alone_are_runnable(service):
    worker = service._worker
    assert service.status().num_runnable_requests == 0
    tasks = [prefill(service, name) for name in "ab"]
    await asyncio.sleep(0)
    assert service.status().num_runnable_requests == 2  # nobody holds blocks: they can have them
    worker.next_steps()
    assert service.status().num_runnable_requests == 2
    worker.step_failed()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert service.status().num_runnable_requests == 0
