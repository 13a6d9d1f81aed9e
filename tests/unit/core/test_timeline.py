"""The phases of a request add up to its whole time."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.timeline import Phases

NAMES = (
    "tokenize place recovery reserve queue prefill exposed_transfer slot_wait decode delivery"
).split()
seconds = st.floats(0, 1e4)


@given(st.tuples(*[seconds] * len(NAMES)), seconds)
def test_phases_and_the_rest_are_the_whole(values, rest_s):
    fields = {f"{name}_s": value for name, value in zip(NAMES, values, strict=True)}
    phases = Phases(**fields, total_s=sum(values) + rest_s)
    assert phases.accounted_s == pytest.approx(sum(values))
    assert phases.unaccounted_s == pytest.approx(rest_s, abs=1e-6)
    assert phases.accounted_s + phases.unaccounted_s == pytest.approx(phases.total_s)


def test_phases_come_in_the_order_in_which_they_happen_without_the_wholes():
    fields = {f"{name}_s": float(place) for place, name in enumerate(NAMES)}
    phases = Phases(**fields, total_s=99.0, time_to_first_token_s=98.0)
    assert phases.items() == [(name, float(place)) for place, name in enumerate(NAMES)]


def test_every_field_is_a_phase_or_a_whole():
    names = {field.name for field in dataclasses.fields(Phases)}
    assert names == {f"{name}_s" for name in NAMES} | {"total_s", "time_to_first_token_s"}
