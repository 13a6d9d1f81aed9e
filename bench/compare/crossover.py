"""From which prompt length on it pays to disaggregate, and by which rule that is said.

The rule: a way *keeps the pace* at a length if the 99th percentile of the gaps of running streams,
while a prompt of that length is read beside them, is at most PACE_MULTIPLE times a decode step
that nothing disturbs (the strict target of Sarathi-Serve, OSDI'24, s.5.1; the step of the quickest
way is taken, so that the target is the same for all). Of the ways that keep the pace, the one with
the soonest first token is the choice. The crossover is the shortest measured length from which on,
for that length and all longer ones, `disaggregated` is the choice. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from core.config import Mode

PACE_MULTIPLE = 5


@dataclass(frozen=True, slots=True)
class Beside:
    """One prompt beside running streams; ITL is theirs, before it came and while it was read."""

    num_prompt_tokens: int
    ttft_s: float
    quiet_itl_s: float
    itl_p99_s: float
    itl_max_s: float


@dataclass(frozen=True, slots=True)
class Crossover:
    """All that was measured, by way, in the order of the lengths."""

    points: Mapping[Mode, tuple[Beside, ...]]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prompt tokens, rising."""
        return tuple(point.num_prompt_tokens for point in next(iter(self.points.values())))

    def quiet_itl_s(self, way: Mode) -> float:
        """A step of decode that nothing disturbs."""
        return min(point.quiet_itl_s for point in self.points[way])

    @property
    def decode_step_s(self) -> float:
        """The same of the quickest way: what targets are multiples of."""
        return min(map(self.quiet_itl_s, self.points))

    @property
    def target_s(self) -> float:
        """What a gap may be."""
        return PACE_MULTIPLE * self.decode_step_s

    def choices(self, target_s: float) -> list[Mode | None]:
        """For each length the way to choose; None where no way keeps the pace."""
        return [self._choice(index, target_s) for index in range(len(self.lengths))]

    def from_tokens(self, target_s: float) -> int | None:
        """The crossover for this target; None if it is not reached."""
        found = None
        pairs = zip(self.lengths, self.choices(target_s), strict=True)
        for length, choice in reversed(list(pairs)):
            if choice is not Mode.DISAGGREGATED:
                break
            found = length
        return found

    def targets_s(self) -> tuple[float, float] | None:
        """The targets, from and below, for which it is the choice at the longest length."""
        own = self.points[Mode.DISAGGREGATED][-1]
        others = [
            points[-1] for way, points in self.points.items() if way is not Mode.DISAGGREGATED
        ]
        sooner = [point.itl_p99_s for point in others if point.ttft_s <= own.ttft_s]
        below_s = min(sooner, default=float("inf"))
        return (own.itl_p99_s, below_s) if own.itl_p99_s < below_s else None

    def _choice(self, index: int, target_s: float) -> Mode | None:
        keeping = {
            way: points[index].ttft_s
            for way, points in self.points.items()
            if points[index].itl_p99_s <= target_s
        }
        return min(keeping, key=keeping.__getitem__) if keeping else None


def sentence(crossover: Crossover) -> str:
    """The verdict in one sentence."""
    target_s, lengths = crossover.target_s, crossover.lengths
    target = f"with gaps of running streams of at most {target_s * 1e3:.0f} ms"
    if Mode.DISAGGREGATED not in crossover.points:
        return "Disaggregation was not played: there is no crossover to tell."
    tokens = crossover.from_tokens(target_s)
    if tokens is None:
        return (
            f"Disaggregation does not pay on this machine up to {lengths[-1]} prompt tokens, "
            f"{target}: {_why_not(crossover)}."
        )
    if tokens == lengths[0]:
        return f"Disaggregate on this machine from {tokens} prompt tokens or fewer on, {target}."
    before = lengths[lengths.index(tokens) - 1]
    return (
        f"Disaggregate above {before} prompt tokens on this machine, {target}: it is the choice at "
        f"{tokens} tokens and at every longer prompt measured."
    )


def _why_not(crossover: Crossover) -> str:
    choice = crossover.choices(crossover.target_s)[-1]
    if choice is None:
        return "at the longest prompt no way keeps that"
    own = crossover.points[Mode.DISAGGREGATED][-1]
    its = crossover.points[choice][-1]
    if own.itl_p99_s > crossover.target_s:
        return f"it does not keep that itself, and {choice} does"
    return (
        f"{choice} keeps that, too, and has the first token after {its.ttft_s:.2f} s, not "
        f"{own.ttft_s:.2f} s"
    )
