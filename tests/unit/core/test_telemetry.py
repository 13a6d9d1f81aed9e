"""The metric table is sound, and what is told of it is what Prometheus reads."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core import telemetry
from core.telemetry import TABLE, Kind, Sample, Telemetry, input_length, markdown


def families(data):
    return {family.name: family for family in text_string_to_metric_families(data.decode())}


def test_every_entry_is_named_once_in_the_form_of_the_house():
    names = [entry.name for entry in TABLE]
    assert len(set(names)) == len(names)
    for entry in TABLE:
        assert re.fullmatch(r"twophase_[a-z_]+", entry.name)
        assert entry.name.endswith("_total") == (entry.kind is Kind.COUNTER)
        assert bool(entry.buckets) == (entry.kind is Kind.HISTOGRAM)
        assert entry.buckets == tuple(sorted(entry.buckets))
        assert entry.kind is not Kind.HISTOGRAM or entry.unit == "seconds"
        assert entry.meaning.endswith(".") and f"`{entry.name}`" in markdown()


def test_every_entry_of_the_module_is_in_the_table():
    entries = [value for value in vars(telemetry).values() if isinstance(value, telemetry.Entry)]
    assert sorted(entry.name for entry in entries) == sorted(entry.name for entry in TABLE)


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


@pytest.mark.parametrize(
    ("num_tokens", "label"),
    [(1, "128"), (128, "128"), (129, "512"), (32768, "32768"), (40000, "inf")],
)
def test_prompts_are_told_apart_by_the_most_tokens_of_their_bucket(num_tokens, label):
    assert input_length(num_tokens) == label
