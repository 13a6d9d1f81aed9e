"""How fast an answer grows at its decode worker, and what ran while it waited for a token.

The worker notes each of its steps in a `StepLog`; each running sequence has a `Pace`, which is told
of every token and looks the steps up that ran since the token before. So a long gap names the
prompts that were read in it, whether in the same step (chunked) or in one of their own (colocated).

Pure: facts and times in. O(1) for a token, but for one that makes the longest gap so far.
"""

from dataclasses import dataclass, field

from core.events.event import MAX_NAMED
from core.request import RequestId
from core.timeline import DecodeReport, Gap
from decode_worker.runs import Runs
from decode_worker.step_log import StepFacts, StepLog


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
    _runs: Runs = field(default_factory=Runs)

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
        is_longest = self._longest is None or gap_s > self._longest.gap_s
        is_late = self._runs.is_late(gap_s)
        if is_longest or is_late:
            gap = _gap(index, gap_s, log.since(self._last_s))
            self._longest = gap if is_longest else self._longest
        if is_late:
            self._runs.late(self._last_s, gap)
        else:
            self._runs.step(index, self._last_s, step)
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
            events=self._runs.events(),
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
