"""Three failures in a row keep requests away from a worker; one that succeeds lets them back."""

import pytest

from router.members.breaker import FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_FAILURES, WINDOW_S, Breaker


def opened(now_s=0.0):
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.failed(now_s)
    return breaker


class TestClosed:
    def test_it_allows_requests_until_enough_have_failed_in_a_row(self):
        breaker = Breaker()
        for _ in range(MAX_FAILURES):
            assert breaker.allows(0.0)
            breaker.failed(0.0)
        assert not breaker.allows(0.0)

    def test_a_success_between_failures_keeps_it_closed(self):
        breaker = Breaker()
        for _ in range(5):
            for _ in range(MAX_FAILURES - 1):
                breaker.failed(0.0)
            breaker.succeeded()
        assert breaker.allows(0.0)

    def test_failures_far_apart_are_not_in_a_row(self):
        breaker = Breaker()
        for number in range(2 * MAX_FAILURES):
            breaker.failed(number * (WINDOW_S + 1.0))
        assert breaker.allows(2 * MAX_FAILURES * (WINDOW_S + 1.0))

    def test_one_that_cannot_be_reached_is_open_at_once(self):
        breaker = Breaker()
        breaker.failed(0.0, is_unreachable=True)
        assert not breaker.allows(0.0)


class TestOpen:
    def test_it_allows_nothing_until_its_backoff_has_passed(self):
        breaker = opened()
        assert not breaker.allows(FIRST_BACKOFF_S - 0.01)
        assert breaker.allows(FIRST_BACKOFF_S)

    def test_what_failed_meanwhile_began_before_and_does_not_prolong_it(self):
        breaker = opened()
        breaker.failed(FIRST_BACKOFF_S / 2)
        assert breaker.allows(FIRST_BACKOFF_S)


class TestHalfOpen:
    def test_one_request_tries_it_at_a_time(self):
        breaker = opened()
        with breaker.attempt():
            assert not breaker.allows(FIRST_BACKOFF_S)
        assert breaker.allows(FIRST_BACKOFF_S)

    def test_a_trial_that_was_cancelled_leaves_the_next_one_free(self):
        breaker = opened()
        with pytest.raises(ZeroDivisionError), breaker.attempt():
            raise ZeroDivisionError
        assert breaker.allows(FIRST_BACKOFF_S)

    def test_requests_from_before_are_no_trials(self):
        breaker = Breaker()
        with breaker.attempt():
            for _ in range(MAX_FAILURES):
                breaker.failed(0.0)
            assert breaker.allows(FIRST_BACKOFF_S)

    def test_a_success_closes_it(self):
        breaker = opened()
        breaker.succeeded()
        with breaker.attempt(), breaker.attempt():
            assert breaker.allows(0.0)

    def test_each_failed_trial_doubles_the_backoff_up_to_its_limit(self):
        breaker, now_s, waits = opened(), 0.0, []
        for _ in range(8):
            wait_s = next(s for s in range(1, 100) if breaker.allows(now_s + s))
            waits.append(wait_s)
            now_s += wait_s
            breaker.failed(now_s)
        assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
        assert MAX_BACKOFF_S == 30

    def test_after_a_success_the_backoff_is_the_first_one_again(self):
        breaker = opened()
        breaker.failed(FIRST_BACKOFF_S)
        breaker.succeeded()
        for _ in range(MAX_FAILURES):
            breaker.failed(100.0)
        assert breaker.allows(100.0 + FIRST_BACKOFF_S)
