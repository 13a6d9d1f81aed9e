"""Waits double up to a limit, and begin anew after a success."""

from core.backoff import Backoff


def test_waits_double_up_to_the_limit():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_success_begins_anew():
    backoff = Backoff(0.5, 3.0)
    backoff.next_s(), backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_a_thousand_failures_do_not_overflow():
    backoff = Backoff(0.5, 30.0)
    assert {backoff.next_s() for _ in range(2000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}
