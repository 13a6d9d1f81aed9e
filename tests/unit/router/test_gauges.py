"""Of workers /metrics tells what those that live have said of themselves."""

from types import SimpleNamespace

import pytest

from core import telemetry
from core.config import Mode
from core.telemetry import Sample
from core.worker import LinkStatus, Role
from router.telemetry.gauges import Gauges
from router.telemetry.totals import KvCounters
from router.tracing.traces import Traces
from tests.unit.router.doubles import until


def telling(fleet, clock, mode=Mode.DISAGGREGATED):
    dispatcher = SimpleNamespace(num_waiting=0, demand=SimpleNamespace(oldest_in_line_s=0.0))
    door = SimpleNamespace(
        running=SimpleNamespace(num_answers=0),
        readiness=SimpleNamespace(is_ready=True),
        counters=KvCounters(),
        traces=Traces(clock),
    )
    gauges = Gauges(fleet, dispatcher, door, clock, mode)
    return lambda: {(sample.entry, sample.labels): sample.value for sample in gauges.samples()}


@pytest.fixture
def told(fleet, clock):
    return telling(fleet, clock)


def steps(number):
    return (Sample(telemetry.WORKER_OUTPUT_TOKENS, number, ("decode-0",)),)


OUTPUT = (telemetry.WORKER_OUTPUT_TOKENS, ("decode-0",))


async def test_a_worker_that_is_gone_tells_nothing_and_the_next_one_begins_anew(
    told, fleet, join, cluster
):
    worker = await join("decode-0")
    assert OUTPUT not in told()  # connected, and not heard of yet
    worker.answer_heartbeat(samples=steps(7))
    await until(lambda: told().get(OUTPUT) == 7)
    worker.answer_heartbeat(samples=steps(9))
    await until(lambda: told().get(OUTPUT) == 9)

    worker.die()
    await until(lambda: not fleet.members(Role.DECODE))
    assert not [labels for _, labels in told() if "decode-0" in labels]
    assert told()[telemetry.WORKERS, ("decode", "ready")] == 0

    again = cluster.start("decode-0", Role.DECODE, incarnation="2")
    fleet.add(again.address)
    await until(lambda: fleet.members(Role.DECODE))
    assert OUTPUT not in told()
    again.answer_heartbeat(samples=steps(1))
    await until(lambda: told().get(OUTPUT) == 1)


async def test_a_link_is_told_by_its_sender_alone_once_it_was_measured(told, join):
    prefill, decode = await join("prefill-0", Role.PREFILL), await join("decode-0")
    measured = LinkStatus("decode-0", "shm", "same host", 5, latency_s=0.001, bytes_per_s=1e9)
    unmeasured = LinkStatus("decode-1", "shm", "same host", 0)
    decode.answer_heartbeat(links=(LinkStatus("prefill-0", "shm", "same host", 5),))
    prefill.answer_heartbeat(links=(measured, unmeasured))
    link = ("prefill-0", "decode-0", "shm")
    await until(lambda: (telemetry.LINK_BANDWIDTH, link) in told())
    links = {key: value for key, value in told().items() if "shm" in key[1]}
    assert links == {
        (telemetry.LINK_BANDWIDTH, link): 1e9,
        (telemetry.LINK_ROUND_TRIP, link): 0.001,
    }


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.CHUNKED])
async def test_where_no_prefill_pool_should_be_none_is_missing(fleet, clock, mode):
    pools = {labels[0] for entry, labels in telling(fleet, clock, mode)() if entry.name == WORKERS}
    assert pools == {"decode"}


WORKERS = telemetry.WORKERS.name
