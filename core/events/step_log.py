"""What the last steps of a worker were: recorded while it runs, written to a file when it ends.

Off unless `engine.step_log` names a directory. One JSON line a step, in the order of time.
"""

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from core.request import WorkerName

# About 10 MB of records; more than an hour of decode steps on a CPU.
MAX_RECORDS = 100_000
SUFFIX = ".steps.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: when it ended on this host's monotonic clock, how long it took, what was in it.

    num_decoding sequences got a token each; num_prompt_tokens were read of prompts.
    """

    ended_s: float
    step_s: float
    num_decoding: int
    num_prompt_tokens: int


class StepRecorder:
    """The last MAX_RECORDS steps of one worker, oldest first."""

    def __init__(self, directory: Path, worker: WorkerName) -> None:
        self._path = directory / f"{worker}{SUFFIX}"
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, record: StepRecord) -> None:
        """A step ended."""
        self._records.append(record)

    def write(self) -> None:
        """Write the worker's file; the directory is made if it is missing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in self._records)
        self._path.write_text(lines, encoding="utf-8")


def read_step_logs(directory: Path) -> dict[WorkerName, list[StepRecord]]:
    """The steps of each worker that wrote there, by its name."""
    found = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [StepRecord(**json.loads(line)) for line in lines]
        found[WorkerName(path.name.removesuffix(SUFFIX))] = records
    return found
