"""Ready means that a real token just went through the pools that are connected now."""

import asyncio
from types import SimpleNamespace

import pytest

from core.config import Mode
from core.errors import DeadlineExceeded, PeerLost
from core.listing import WorkerState
from core.worker import CancelRequest, RequestFailed, Reserve, Role
from router import readiness as readiness_module
from router.dispatch import Dispatcher, DispatchPolicy
from router.members.fleet import Fleet
from router.readiness import Readiness
from router.telemetry.totals import KvCounters
from tests.unit.router.doubles import (
    DONE,
    PREFILL_REPORT,
    WEDGED_AFTER_S,
    WORKER_TIMEOUT_S,
    reserved,
    token,
    until,
)

WARM_S = 0.1
LATE_S = 10.0


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


class Pairs:
    """A dispatcher whose probes end when, and as, the test says."""

    def __init__(self):
        self.probes = {}

    async def run(self, answer, *, placement, **rest):
        probe = self.probes[placement.prefill, placement.decode] = asyncio.Future()
        try:
            async with asyncio.timeout(WARM_S):
                await probe
        except TimeoutError as error:
            raise DeadlineExceeded("the probe was not done in time") from error


@pytest.fixture
async def warming(cluster, clock):
    """A fleet that warms its workers, what probes them, and how they join."""

    async def announce(is_ready):
        pass

    async def join(name, role=Role.DECODE):
        worker = cluster.start(name, role)
        fleet.add(worker.address)
        await until(lambda: any(m.info.name == name for m in fleet.members(role)))

    limits = {"worker_timeout_s": WORKER_TIMEOUT_S, "wedged_after_s": WEDGED_AFTER_S}
    async with Fleet(clock, **limits, warm_s=WARM_S) as fleet:
        pairs = Pairs()
        readiness = Readiness(
            fleet, pairs, (1,), mode=Mode.DISAGGREGATED, announce=announce, clock=clock
        )
        task = asyncio.create_task(readiness.run())
        yield SimpleNamespace(fleet=fleet, probes=pairs.probes, join=join, readiness=readiness)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def placeable(fleet):
    return {load.name for load in (*fleet.prefill_loads(), *fleet.decode_loads())}


async def one_pair(warming):
    await warming.join("prefill-0", Role.PREFILL)
    await warming.join("decode-0")
    await until(lambda: warming.probes)
    # Nobody else is there: who asks now makes the link.
    assert placeable(warming.fleet) == {"prefill-0", "decode-0"}
    assert not warming.readiness.is_ready
    warming.probes["prefill-0", "decode-0"].set_result(None)
    await until(lambda: warming.readiness.is_ready and not warming.fleet.cold)


@pytest.mark.case("B-165")
async def test_a_new_worker_is_given_requests_once_all_its_links_are_tested(warming):
    await one_pair(warming)
    await warming.join("decode-1")
    await until(lambda: ("prefill-0", "decode-1") in warming.probes)
    (state,) = {m.state(1000.0) for m in warming.fleet.cold}
    assert state is WorkerState.WARMING
    assert placeable(warming.fleet) == {"prefill-0", "decode-0"}
    warming.probes["prefill-0", "decode-1"].set_result(None)
    await until(lambda: placeable(warming.fleet) == {"prefill-0", "decode-0", "decode-1"})
    await warming.join("prefill-1", Role.PREFILL)
    await until(lambda: len(warming.probes) == 4)
    warming.probes["prefill-1", "decode-0"].set_result(None)
    assert "prefill-1" not in placeable(warming.fleet)  # one of its two is not tested yet
    warming.probes["prefill-1", "decode-1"].set_result(None)
    await until(lambda: "prefill-1" in placeable(warming.fleet))


async def test_a_cold_worker_serves_before_one_that_has_failed(warming):
    await one_pair(warming)
    await warming.join("decode-1")
    await until(lambda: warming.fleet.cold)
    warming.fleet.decode("decode-0").breaker.failed(1000.0, is_unreachable=True)
    assert placeable(warming.fleet) == {"prefill-0", "decode-1"}
    warming.fleet.decode("decode-1").breaker.failed(1000.0, is_unreachable=True)
    assert placeable(warming.fleet) == {"prefill-0", "decode-0", "decode-1"}


async def test_a_partner_that_cannot_be_reached_holds_a_new_worker_up_for_a_while_only(
    warming, caplog
):
    caplog.set_level("INFO")
    await one_pair(warming)
    await warming.join("decode-1")
    async with asyncio.timeout(LATE_S):
        while "decode-1" not in placeable(warming.fleet):
            await asyncio.sleep(0)
    assert "decode-1: 0 of 1 links are tested" in caplog.text
