"""The steps that made an answer, as few events: runs of steps of similar length, and long gaps.

A step joins the run before it while it took between half and twice that run's mean, or both are
short. One that took three times the answer's mean is a gap of its own.

Pure. O(1) for a token and without allocation, but for one that begins a run; the number of events
is bounded: the shortest neighbours are told together.
"""

from dataclasses import dataclass

from core.events.event import BoundedEvents, Event, EventKind
from core.timeline import Gap
from decode_worker.step_log import StepFacts

MAX_EVENTS = 48
LONG = 3.0
# Below it a step is as long as the machine's moods make it.
MIN_LONG_S = 0.01


@dataclass(slots=True)
class _Run:
    index: int
    begin_s: float
    num_steps: int = 0
    length_s: float = 0.0
    step_s: float = 0.0
    num_prompt_tokens: int = 0
    num_sequences: int = 0
    num_history_tokens: int = 0

    def takes(self, gap_s: float) -> bool:
        if gap_s < MIN_LONG_S and self.length_s < MIN_LONG_S * self.num_steps:
            return True
        return self.length_s < 2 * gap_s * self.num_steps < 4 * self.length_s

    def add(self, gap_s: float, step: StepFacts) -> None:
        self.num_steps += 1
        self.length_s += gap_s
        self.step_s += step.step_s
        for _, num_tokens in step.prompts:
            self.num_prompt_tokens += num_tokens
        self.num_sequences = max(self.num_sequences, step.num_sequences)
        self.num_history_tokens = max(self.num_history_tokens, step.num_history_tokens)

    def event(self) -> Event:
        return Event(
            EventKind.STEPS,
            self.begin_s,
            self.begin_s + self.length_s,
            index=self.index,
            count=self.num_steps,
            busy_s=self.step_s,
            num_tokens=self.num_prompt_tokens,
            num_sequences=self.num_sequences,
            num_history_tokens=self.num_history_tokens,
        )


class Runs:
    """Of one answer, from the begin of its first decode step."""

    def __init__(self) -> None:
        self._events = BoundedEvents(MAX_EVENTS)
        self._run: _Run | None = None
        self._num_steps = 0
        self._length_s = 0.0

    def is_late(self, gap_s: float) -> bool:
        """Whether a token that came so long after the one before it is a gap of its own."""
        if gap_s < MIN_LONG_S or self._num_steps == 0:
            return False
        return gap_s * self._num_steps > LONG * self._length_s

    def step(self, index: int, begin_s: float, step: StepFacts) -> None:
        """The index-th token came out of `step`; the one before it at `begin_s`."""
        gap_s = step.ended_s - begin_s
        if self._run is None or not self._run.takes(gap_s):
            self._end_run()
            self._run = _Run(index, begin_s)
        self._run.add(gap_s, step)
        self._num_steps += 1
        self._length_s += gap_s

    def late(self, begin_s: float, gap: Gap) -> None:
        """A token came late after the one at `begin_s`; it does not count for the mean."""
        self._end_run()
        self._events.add(
            Event(
                EventKind.GAP,
                begin_s,
                begin_s + gap.gap_s,
                index=gap.index,
                busy_s=gap.step_s,
                num_tokens=gap.num_prompt_tokens,
                num_sequences=gap.num_sequences,
                num_history_tokens=gap.num_history_tokens,
                request_ids=gap.prompts,
            )
        )

    def events(self) -> tuple[Event, ...]:
        """All of them; the answer is complete."""
        self._end_run()
        return self._events.all()

    def _end_run(self) -> None:
        if self._run is not None:
            self._events.add(self._run.event())
            self._run = None
