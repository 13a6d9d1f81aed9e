"""What is told of metrics is what Prometheus reads."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core import telemetry
from core.clock import ManualClock
from core.request import WorkerName
from core.tally import Tally
from core.telemetry import Sample
from router.answer import Answer
from router.telemetry.exposition import NoTelemetry, Telemetry
from router.telemetry.measured import Measured
from tests.unit.router.doubles import make_request


def families(data):
    return {family.name: family for family in text_string_to_metric_families(data.decode())}


def test_measured_and_looked_up_values_are_told_together():
    told = Telemetry()
    told.histogram(telemetry.TIME_TO_FIRST_TOKEN).observe(0.3)
    told.counter(telemetry.REQUESTS).labels("stop").inc(2)
    samples = [
        Sample(telemetry.KV_BLOCKS, 5, ("decode-0", "free")),
        Sample(telemetry.KV_BLOCKS, 7, ('odd "name"\n', "used")),
        Sample(telemetry.LINK_BYTES, 9, ("prefill-0", "decode-0", "shm")),
    ]
    for _ in range(2):  # reading changes nothing
        found = families(told.exposition(samples))
    ttft = {(s.name, s.labels.get("le")): s.value for s in found[TTFT].samples}
    assert ttft[f"{TTFT}_count", None] == 1
    assert (ttft[f"{TTFT}_bucket", "0.25"], ttft[f"{TTFT}_bucket", "0.5"]) == (0, 1)
    assert [(s.labels, s.value) for s in found["twophase_requests"].samples] == [
        ({"outcome": "stop"}, 2)
    ]
    assert found["twophase_kv_blocks"].type == "gauge"
    assert [(s.labels["worker"], s.value) for s in found["twophase_kv_blocks"].samples] == [
        ("decode-0", 5),
        ('odd "name"\n', 7),
    ]
    assert found["twophase_link_bytes"].type == "counter"
    assert not any("_created" in name for name in found)


TTFT = telemetry.TIME_TO_FIRST_TOKEN.name


def test_a_metric_is_asked_for_by_its_kind_and_from_the_table():
    with pytest.raises(AssertionError):
        Telemetry().counter(telemetry.TIME_TO_FIRST_TOKEN)


def test_what_a_worker_counted_is_told_as_if_it_had_been_observed_here():
    """Prometheus' own histogram is the naive model: the same values, the same text."""
    entry, values = telemetry.PREFILL, [0.001, 0.005, 0.0051, 7.0, 600.0, 601.0]
    here, tally = Telemetry(), Tally()
    observed = here.histogram(entry).labels("128")
    counted = tally.distribution(telemetry.STEP, "decode")
    assert counted is tally.distribution(telemetry.STEP, "decode")
    of_worker = Tally().distribution(entry)
    for value in values:
        observed.observe(value)
        of_worker.observe(value)
    sample = Sample(entry, of_worker.sum, ("128",), tuple(of_worker.counts))
    assert Telemetry().exposition([sample]) == here.exposition([])


def test_a_workers_samples_carry_its_name_and_every_label_of_their_metric():
    tally = Tally()
    tally.total(telemetry.WORKER_PROMPT_TOKENS, "prefill").value += 7
    tally.distribution(telemetry.LINK_WAIT, "decode-0", "shm").observe(0.3)
    total, waits = tally.samples(WorkerName("prefill-0"))
    assert (total.value, total.labels) == (7, ("prefill-0", "prefill"))
    assert (waits.value, waits.labels) == (0.3, ("prefill-0", "decode-0", "shm"))
    assert sum(waits.counts) == 1 and len(waits.counts) == len(waits.entry.buckets) + 1


def test_where_nothing_is_measured_gauges_are_told_alone():
    measured = Measured(NoTelemetry())
    measured.failed(asyncio.CancelledError())
    measured.meter(Answer(make_request(), 0.0, 0.0), ManualClock()).delivered(1)
    gauge = Sample(telemetry.READY, 1.0)
    assert list(families(measured.telemetry.exposition([gauge]))) == ["twophase_ready"]


def test_a_client_that_had_no_time_left_did_not_give_up():
    measured = Measured()
    for is_late in (False, True, True):
        measured.failed(asyncio.CancelledError(), is_late=is_late)
    told = families(measured.telemetry.exposition([]))["twophase_requests"].samples
    assert {s.labels["outcome"]: s.value for s in told} == {"cancelled": 1, "deadline_exceeded": 2}
