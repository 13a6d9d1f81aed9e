"""How fast an answer grows at its decode worker, and what ran while it waited for a token.

The worker notes each of its steps in a `StepLog`; each running sequence has a `Pace`, which is told
of every token and looks the steps up that ran since the token before. So a long gap names the
prompts that were read in it, whether in the same step (chunked) or in one of their own (colocated).

Pure: facts and times in. O(1) for a token, but for one that makes the longest gap so far.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile

from core.request import RequestId
from core.step_log import StepRecord, StepRecorder
from core.timeline import DecodeReport, Gap

# Steps that are remembered; a gap over more of them names only the last.
MAX_STEPS = 64
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of the engine: when, how long, and what was in it.

    num_history_tokens: tokens whose KV the sequences that decode read. prompts: tokens that were
    read of each request's prompt.
    """

    ended_s: float
    step_s: float
    num_sequences: int
    num_history_tokens: int
    prompts: tuple[tuple[RequestId, int], ...]


class StepLog:
    """The last steps, newest last; a recorder is told of each."""

    def __init__(self, recorder: StepRecorder | None = None) -> None:
        self._recorder = recorder
        self._steps: deque[StepFacts] = deque(maxlen=MAX_STEPS)
        self._prompt_read_s = float("-inf")

    def add(self, step: StepFacts) -> None:
        """A step ended."""
        self._steps.append(step)
        if step.prompts:
            self._prompt_read_s = step.ended_s
        if self._recorder is not None:
            num_prompt_tokens = sum(num_tokens for _, num_tokens in step.prompts)
            self._recorder.add(
                StepRecord(step.ended_s, step.step_s, step.num_sequences, num_prompt_tokens)
            )

    @property
    def last(self) -> StepFacts:
        """The step that ended last; there must have been one."""
        return self._steps[-1]

    def has_read_a_prompt_since(self, after_s: float) -> bool:
        """Whether a step that ended after then read one."""
        return self._prompt_read_s > after_s

    def since(self, after_s: float) -> list[StepFacts]:
        """The last step, then those before it that ended after then, newest first."""
        before = islice(reversed(self._steps), 1, None)
        return [self.last, *takewhile(lambda step: step.ended_s > after_s, before)]


@dataclass(slots=True)
class Pace:
    """Of one answer, from the begin of its first decode step.

    Invariant: the sums are over the tokens of decode so far, each of which ended one gap.
    """

    began_s: float
    _last_s: float = field(init=False)
    _num_tokens: int = 0
    _step_s: float = 0.0
    _num_sequences: int = 0
    _num_history_tokens: int = 0
    _prompt_gap_s: float = 0.0
    _longest: Gap | None = None

    def __post_init__(self) -> None:
        """The first gap begins with the first step."""
        self._last_s = self.began_s

    def token(self, index: int, log: StepLog) -> None:
        """The index-th token of the answer came out of the log's last step."""
        step = log.last
        gap_s = step.ended_s - self._last_s
        self._num_tokens += 1
        self._step_s += step.step_s
        self._num_sequences += step.num_sequences
        self._num_history_tokens += step.num_history_tokens
        if log.has_read_a_prompt_since(self._last_s):
            self._prompt_gap_s += gap_s
        if self._longest is None or gap_s > self._longest.gap_s:
            self._longest = _gap(index, gap_s, log.since(self._last_s))
        self._last_s = step.ended_s

    def report(self, slot_wait_s: float) -> DecodeReport:
        """What was measured until the last token."""
        num_tokens = max(self._num_tokens, 1)
        return DecodeReport(
            slot_wait_s=slot_wait_s,
            decode_s=self._last_s - self.began_s,
            step_s=self._step_s,
            mean_num_sequences=self._num_sequences / num_tokens,
            mean_num_history_tokens=self._num_history_tokens / num_tokens,
            prompt_gap_s=self._prompt_gap_s,
            longest_gap=self._longest,
        )


def _gap(index: int, gap_s: float, steps: list[StepFacts]) -> Gap:
    num_tokens: dict[RequestId, int] = {}
    for step in steps:
        for request_id, num in step.prompts:
            num_tokens[request_id] = num_tokens.get(request_id, 0) + num
    most_first = sorted(num_tokens, key=num_tokens.__getitem__, reverse=True)
    return Gap(
        index=index,
        gap_s=gap_s,
        step_s=sum(step.step_s for step in steps),
        num_sequences=steps[0].num_sequences,
        num_history_tokens=steps[0].num_history_tokens,
        num_prompt_tokens=sum(num_tokens.values()),
        prompts=tuple(most_first[:MAX_NAMED]),
    )
