"""The metric table is sound."""

import re

import pytest

from core import telemetry
from core.telemetry import BATCHES, TABLE, Kind, input_length, markdown, size_label


def test_every_entry_is_named_once_in_the_form_of_the_house():
    names = [entry.name for entry in TABLE]
    assert len(set(names)) == len(names)
    for entry in TABLE:
        assert re.fullmatch(r"twophase_[a-z_]+", entry.name)
        assert entry.name.endswith("_total") == (entry.kind is Kind.COUNTER)
        assert bool(entry.buckets) == (entry.kind is Kind.HISTOGRAM)
        assert entry.buckets == tuple(sorted(entry.buckets))
        assert entry.kind is not Kind.HISTOGRAM or entry.unit in ("seconds", "bytes")
        assert entry.meaning.endswith(".") and f"`{entry.name}`" in markdown()


def test_every_entry_of_the_module_is_in_the_table():
    entries = [value for value in vars(telemetry).values() if isinstance(value, telemetry.Entry)]
    assert sorted(entry.name for entry in entries) == sorted(entry.name for entry in TABLE)


@pytest.mark.parametrize(
    ("num_tokens", "label"),
    [(1, "128"), (128, "128"), (129, "512"), (32768, "32768"), (40000, "inf")],
)
def test_prompts_are_told_apart_by_the_most_tokens_of_their_bucket(num_tokens, label):
    assert input_length(num_tokens) == label


def test_sizes_are_told_by_the_largest_of_their_class():
    labels = [size_label(BATCHES, place) for place in range(len(BATCHES) + 1)]
    assert labels == ["1", "4", "16", "64", "inf"]
