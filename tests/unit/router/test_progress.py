"""A worker whose steps stand still while work waits is wedged; one that is idle is not."""

import dataclasses

from router.members.progress import StepWatch
from tests.unit.router.doubles import make_info, make_status


def status(num_steps, num_runnable):
    return dataclasses.replace(
        make_status(make_info("decode-0")),
        num_steps=num_steps,
        num_runnable_requests=num_runnable,
    )


def test_time_counts_while_work_waits_and_no_step_is_done():
    watch = StepWatch()
    assert watch.stalled_s(status(7, 2), 100.0) == 0.0
    assert watch.stalled_s(status(7, 2), 130.0) == 30.0
    assert watch.stalled_s(status(7, 1), 160.0) == 60.0


def test_a_step_begins_anew():
    watch = StepWatch()
    watch.stalled_s(status(7, 2), 100.0)
    assert watch.stalled_s(status(8, 2), 159.0) == 0.0
    assert watch.stalled_s(status(8, 2), 160.0) == 1.0


def test_an_idle_worker_never_stalls():
    watch = StepWatch()
    for now_s in range(0, 1000, 100):
        assert watch.stalled_s(status(7, 0), float(now_s)) == 0.0
