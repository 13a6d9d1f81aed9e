"""A device is given up when nothing succeeds any more, and never for a few bad requests."""

import pytest

from core.errors import DeviceLost
from engine.failed_steps import FAILING_S, MAX_FAILED_STEPS, FailedSteps

ERROR = RuntimeError("device-side assert triggered")


def fail(failed: FailedSteps, times_s: list[float]) -> None:
    for now_s in times_s:
        failed.failed(ERROR, now_s)


def test_steps_that_all_fail_for_long_enough_end_it_with_their_error():
    failed = FailedSteps()
    fail(failed, [100.0 + number for number in range(MAX_FAILED_STEPS - 1)])
    with pytest.raises(DeviceLost, match="none succeeded: device-side assert") as caught:
        failed.failed(ERROR, 100.0 + max(FAILING_S, MAX_FAILED_STEPS))
    assert caught.value.__cause__ is ERROR


def test_many_in_a_moment_do_not_nor_do_few_over_a_long_time():
    fail(FailedSteps(), [100.0] * (3 * MAX_FAILED_STEPS))
    fail(FailedSteps(), [100.0 * number for number in range(MAX_FAILED_STEPS - 1)])


def test_one_that_succeeds_begins_the_count_anew():
    failed = FailedSteps()
    for number in range(5 * MAX_FAILED_STEPS):
        failed.failed(ERROR, 10.0 * number)
        if number % (MAX_FAILED_STEPS - 1) == 0:
            failed.succeeded()
