"""A cluster without processes: the real fleet over FakeWorkers."""

import pytest

from core.clock import ManualClock
from core.worker import Role
from router.keys import caller
from router.members import fleet as fleet_module
from router.members.fleet import Fleet
from tests.unit.router.doubles import WEDGED_AFTER_S, WORKER_TIMEOUT_S, FakeCluster, until


@pytest.fixture
def cluster(monkeypatch):
    cluster = FakeCluster()
    monkeypatch.setattr(fleet_module, "Peer", cluster.connect)
    monkeypatch.setattr(fleet_module, "RECONNECT_S", 0.0)
    monkeypatch.setattr(fleet_module, "HEARTBEAT_S", 0.0)
    return cluster


@pytest.fixture
def clock():
    return ManualClock(1000.0)


@pytest.fixture
async def fleet(cluster, clock):
    """Whatever the test started in `cluster` joins with `join`."""
    async with Fleet(
        clock, worker_timeout_s=WORKER_TIMEOUT_S, wedged_after_s=WEDGED_AFTER_S
    ) as fleet:
        yield fleet


@pytest.fixture
def join(fleet, cluster):
    async def join(name, role=Role.DECODE, **changes):
        worker = cluster.start(name, role, **changes)
        fleet.add(worker.address)
        await until(lambda: any(m.info == worker.info for m in fleet.members(role)))
        return worker

    return join


@pytest.fixture(autouse=True)
def nobody_is_left_as_the_caller():
    """A key that a test showed is not shown by those after it."""
    yield
    caller.set("")
