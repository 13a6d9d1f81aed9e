"""What `twophase status` shows of quarantine: how many blocks, and since when."""

import dataclasses

from rich.console import Console

from core.request import WorkerName
from core.worker import Role, WorkerStatus
from deploy.commands.status import _worker_table

IDLE = WorkerStatus(
    name=WorkerName("decode-0"),
    role=Role.DECODE,
    address="127.0.0.1:1",
    pid=1,
    **dict.fromkeys(
        (field.name for field in dataclasses.fields(WorkerStatus) if field.name[:4] == "num_"), 0
    ),
)


def shown(status):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(_worker_table((status,)))
    return capture.get().splitlines()[-1].split()


def test_quarantined_blocks_come_with_the_age_of_the_oldest():
    stuck = dataclasses.replace(IDLE, num_quarantined_blocks=3, quarantine_age_s=75.0)
    assert "3 for 75.00 s" in " ".join(shown(stuck))
    assert " for " not in " ".join(shown(IDLE))


def test_a_worker_that_stops_is_shown_as_such():
    assert shown(IDLE)[:2] == ["decode-0", "127.0.0.1:1"]
    assert shown(dataclasses.replace(IDLE, is_draining=True))[:2] == ["decode-0", "(stopping)"]


def test_names_and_addresses_are_whole_on_a_terminal_of_80_columns():
    console = Console(width=80)
    status = dataclasses.replace(IDLE, address="127.0.0.1:42771", num_total_blocks=1456)
    with console.capture() as capture:
        console.print(_worker_table((status,)))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "decode-0 127.0.0.1:42771" in " ".join(lines[-1].split())
    assert "quarantined" in capture.get()
