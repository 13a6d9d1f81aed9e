"""A worker of another version tells what this router cannot read: the rest is read all the same."""

import pytest

from core import telemetry
from core.telemetry import Sample
from core.worker import Role, WorkerStatus
from twophase.status_wire import status_from_wire, status_to_wire

KNOWN = Sample(telemetry.WORKER_OUTPUT_TOKENS, 7.0, ("decode-0",))


@pytest.mark.parametrize(
    "told",
    [
        {"metric": "twophase_of_tomorrow_total", "labels": ["decode-0"]},
        {"metric": KNOWN.entry.name, "labels": ["decode-0", "one more"]},
        {"metric": KNOWN.entry.name, "labels": ["decode-0"], "counts": [1, 2]},
        {"metric": telemetry.STEP.name, "labels": ["decode-0", "decode"], "counts": [1, 2]},
        {"metric": telemetry.STEP.name, "labels": ["decode-0", "decode"]},
    ],
)
def test_what_is_not_known_here_is_passed_over(told):
    status = WorkerStatus("decode-0", Role.DECODE, "", *[0] * 14, samples=(KNOWN,))
    message = status_to_wire(status)
    message.samples.add(**told)
    assert status_from_wire(message).samples == (KNOWN,)
