"""The record of a worker's last steps."""

from collections import deque

import pytest

from core.events.step import StepFacts
from core.events.step_log import StepRecord, StepRecorder, read_step_logs
from core.request import RequestId, WorkerName
from decode_worker.recording import recording_of
from decode_worker.step_log import StepLog

WORKER = WorkerName("decode-0")


def test_what_was_recorded_is_read_again(tmp_path):
    recorder = StepRecorder(tmp_path / "steps", WORKER)
    steps = [StepRecord(1.5, 0.25, 3, 0), StepRecord(2.0, 0.5, 3, 64)]
    for step in steps:
        recorder.add(step)

    recorder.write()

    assert read_step_logs(tmp_path / "steps") == {WORKER: steps}
    assert read_step_logs(tmp_path / "nowhere") == {}


def test_the_oldest_steps_are_forgotten(tmp_path):
    recorder = StepRecorder(tmp_path, WORKER)
    recorder._records = deque(maxlen=2)
    for at_s in (1.0, 2.0, 3.0):
        recorder.add(StepRecord(at_s, 0.1, 1, 0))

    recorder.write()

    assert [step.ended_s for step in read_step_logs(tmp_path)[WORKER]] == [2.0, 3.0]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_decode_worker_tells_each_step_also_without_telemetry(tmp_path, is_on):
    recorder = StepRecorder(tmp_path, WORKER)
    recording = recording_of(is_on=is_on, token_bytes=64, recorder=recorder)

    step = StepFacts(4.0, 0.2, 2, 30, ((RequestId("a"), 16), (RequestId("b"), 8)))
    recording.step(StepLog(), step)
    recorder.write()

    assert read_step_logs(tmp_path)[WORKER] == [StepRecord(4.0, 0.2, 2, 24)]
