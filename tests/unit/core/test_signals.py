"""Windows of measured values."""

import pytest

from core.signals import MAX_VALUES, Window


def test_a_window_forgets_what_is_older_than_its_span():
    window = Window(10.0)
    for then_s, value in ((0.0, 100.0), (5.0, 1.0), (9.0, 3.0)):
        window.note(value, then_s)
    assert window.quantile(0.5, 9.0) == 3.0
    assert window.quantile(0.5, 10.5) == 1.0
    assert window.mean(10.5) == 2.0
    assert window.per_s(10.5) == pytest.approx(0.4)


def test_a_window_without_values_knows_nothing():
    window = Window(10.0)
    window.note(1.0, 0.0)
    assert window.quantile(0.95, 11.0) is None
    assert window.mean(11.0) is None
    assert window.per_s(11.0) is None
    assert window.moments(11.0) is None


def test_the_spread_is_variance_over_the_square_of_the_mean():
    window = Window(10.0)
    for value in (1.0, 3.0):
        window.note(value, 0.0)
    assert window.moments(0.0).mean == 2.0
    assert window.moments(0.0).scv == pytest.approx(0.25)


def test_more_values_than_are_kept_shorten_the_span_and_not_the_rate():
    window = Window(10.0)
    for number in range(3 * MAX_VALUES):
        window.note(1.0, number / 1000)
    assert window.per_s(3 * MAX_VALUES / 1000) == pytest.approx(1000, rel=0.01)
