"""What is kept of a worker's steps beyond what serving needs; the composition root chooses.

Without it an answer's phases are told as ever, and not what ran in its gaps.
"""

from dataclasses import dataclass

from core.events.step import StepFacts
from core.events.step_log import StepRecord, StepRecorder
from core.tally import Tally
from core.timeline import DecodeReport
from decode_worker.counts import StepCounts
from decode_worker.pace import Pace
from decode_worker.step_log import StepLog


class BarePace:
    """Of one answer, when its last token came: a `Pace` that looks at nothing else."""

    def __init__(self, began_s: float) -> None:
        self.began_s = self._last_s = began_s

    def token(self, index: int, log: StepLog) -> None:
        """As `Pace.token`."""
        self._last_s = log.last.ended_s

    def report(self, slot_wait_s: float) -> DecodeReport:
        """As `Pace.report`."""
        return DecodeReport(slot_wait_s, self._last_s - self.began_s)


class NoCounts:
    """Counts no step."""

    def __init__(self) -> None:
        self.tally = Tally()

    def step(self, step: StepFacts) -> None:
        """As `StepCounts.step`."""


@dataclass(frozen=True, slots=True)
class Recording:
    """How steps are counted and written down, and what notes the tokens of an answer."""

    counts: StepCounts | NoCounts
    pace: type[Pace] | type[BarePace]
    recorder: StepRecorder | None = None

    def step(self, log: StepLog, step: StepFacts) -> None:
        """A step ended; it is the log's last from now on."""
        log.add(step)
        self.counts.step(step)
        if self.recorder is not None:
            num_prompt_tokens = sum(num_tokens for _, num_tokens in step.prompts)
            self.recorder.add(
                StepRecord(step.ended_s, step.step_s, step.num_sequences, num_prompt_tokens)
            )


def recording_of(
    *, is_on: bool, token_bytes: int, recorder: StepRecorder | None = None
) -> Recording:
    """All of it, or nothing but what `recorder` writes down, if there is one."""
    if is_on:
        return Recording(StepCounts(token_bytes), Pace, recorder)
    return Recording(NoCounts(), BarePace, recorder)
