"""A decode worker whose device fails every step ends, so that another can take its place."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.clock import ManualClock
from core.errors import DeviceLost
from decode_worker.migration import Migrations
from decode_worker.service import DecodeService
from engine.failed_steps import FAILING_S, MAX_FAILED_STEPS
from tests.unit.decode_worker.driver import World, make_request
from tests.unit.decode_worker.test_decode_drain import NoLinks, SilentLinks


class BrokenRunner:
    """Fails each step; the next request comes in the same moment."""

    def __init__(self, world: World, clock: ManualClock) -> None:
        self.world, self.clock, self.num_steps = world, clock, 0

    def step(self, steps: object) -> None:
        self.num_steps += 1
        self.clock.advance(FAILING_S / MAX_FAILED_STEPS)
        self.world.reserve(make_request(f"r{self.num_steps}", deadline_s=1e9), is_local=True)
        raise RuntimeError("illegal memory access")


@pytest.mark.timeout(20)
async def test_it_ends_with_the_error_of_its_device():
    world, clock = World(), ManualClock(0.0)
    runner = BrokenRunner(world, clock)
    world.reserve(make_request("r", deadline_s=1e9), is_local=True)
    with ThreadPoolExecutor(1) as device:
        migrations = Migrations(world.worker, NoLinks(), clock)
        service = DecodeService(
            world.worker, runner, SilentLinks(), migrations, device=device, clock=clock
        )
        with pytest.raises(DeviceLost, match="illegal memory access"):
            await asyncio.wait_for(service.run_device(), 10.0)
    assert runner.num_steps == MAX_FAILED_STEPS + 1
