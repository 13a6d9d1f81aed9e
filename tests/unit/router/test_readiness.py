"""Ready means that a real token just went through the pools that are connected now."""

import asyncio

import pytest

from core.config import Mode
from core.errors import PeerLost
from core.worker import CancelRequest, RequestFailed, Reserve, Role
from router import readiness as readiness_module
from router.dispatch import Dispatcher, DispatchPolicy
from router.readiness import Readiness
from router.totals import KvCounters
from tests.unit.router.doubles import DONE, PREFILL_REPORT, reserved, token, until


def answer(worker):
    """Serve the probe that waits at `worker`; False if there is none."""
    waiting = [c.request.request_id for c in worker.commands if isinstance(c, Reserve)]
    for command in worker.commands:
        if isinstance(command, CancelRequest) and command.request_id in waiting:
            waiting.remove(command.request_id)
    if not waiting:
        return False
    request_id = waiting[-1]
    worker.update(reserved(request_id))
    worker.update(token(0, request_id=request_id, prefill=PREFILL_REPORT))
    worker.update(token(1, request_id=request_id, done=DONE))
    return True


@pytest.fixture
async def probing(fleet, clock, monkeypatch):
    monkeypatch.setattr(readiness_module, "RETRY_S", 0.0)
    announced = []

    async def announce(is_ready):
        announced.append(is_ready)

    async with Dispatcher(fleet, DispatchPolicy(Mode.CHUNKED), KvCounters(), clock) as dispatcher:
        readiness = Readiness(
            fleet, dispatcher, (1, 2), mode=Mode.CHUNKED, announce=announce, clock=clock
        )
        readiness.announced = announced
        task = asyncio.create_task(readiness.run())
        yield readiness
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_cluster_without_workers_is_not_ready_and_nothing_is_announced(probing):
    for _ in range(20):
        await asyncio.sleep(0)
    assert not probing.is_ready
    assert probing.announced == []


async def test_it_is_ready_once_a_probe_came_back_whole(probing, join):
    worker = await join("decode-0")
    await until(lambda: answer(worker))
    await until(lambda: probing.is_ready)
    assert probing.announced == [True]
    (reserve, *_) = worker.commands
    assert reserve.request.sampling.max_tokens == 2


async def test_a_probe_that_fails_is_tried_again(probing, join):
    worker = await join("decode-0")
    await until(lambda: worker.commands)
    request_id = worker.commands[0].request.request_id
    worker.update(RequestFailed(request_id, PeerLost("x", "y")))
    await until(lambda: len([c for c in worker.commands if isinstance(c, Reserve)]) > 1)
    assert not probing.is_ready
    await until(lambda: answer(worker))
    await until(lambda: probing.is_ready)


@pytest.mark.case("B-061")
async def test_a_lost_worker_makes_it_not_ready(probing, join):
    worker = await join("decode-0")
    await until(lambda: answer(worker))
    await until(lambda: probing.is_ready)
    worker.die()
    await until(lambda: not probing.is_ready)
    assert probing.announced == [True, False]


async def test_every_pair_is_probed_and_one_that_works_is_enough(fleet, clock, join):
    class Recorder:
        def __init__(self):
            self.pairs = []

        async def run(self, request, *, placement, **rest):
            self.pairs.append((placement.prefill, placement.decode))
            if placement.prefill == "prefill-0":
                raise PeerLost("prefill-0", "test")

    announced = asyncio.Event()

    async def announce(is_ready):
        announced.set()

    for name, role in (
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
        ("prefill-0", Role.PREFILL),
        ("prefill-1", Role.PREFILL),
    ):
        await join(name, role)
    recorder = Recorder()
    readiness = Readiness(
        fleet, recorder, (1,), mode=Mode.DISAGGREGATED, announce=announce, clock=clock
    )
    task = asyncio.create_task(readiness.run())
    await until(lambda: len(recorder.pairs) == 4)
    await until(lambda: readiness.is_ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert announced.is_set()
    assert set(recorder.pairs) == {
        (f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)
    }
