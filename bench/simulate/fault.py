"""What goes wrong in a run, and when: lost workers, slow links, a pool that cannot start.

lost:decode@120        a decode worker is lost at 120 s, drawn from those that serve
lost:0.5/h             each worker is lost once in two hours, at random times
link:0.1@300-600       links carry a tenth from 300 s to 600 s
start:prefill@0-900    prefill workers that are started from 0 s to 900 s do not come up
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import ConfigError
from core.worker import Role

_NUMBER = r"(\d+(?:\.\d+)?)"
_LOST_AT = re.compile(rf"lost:(prefill|decode)@{_NUMBER}")
_LOST_PER_HOUR = re.compile(rf"lost:{_NUMBER}/h")
_LINK = re.compile(rf"link:{_NUMBER}@{_NUMBER}-{_NUMBER}")
_START = re.compile(rf"start:(prefill|decode)@{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Span:
    """From start_s until before end_s."""

    start_s: float
    end_s: float

    def holds(self, when_s: float) -> bool:
        """Whether `when_s` lies in it."""
        return self.start_s <= when_s < self.end_s


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults of a run; what is drawn is drawn from `seed`."""

    losses: tuple[tuple[float, Role], ...] = ()
    lost_per_hour: float = 0.0
    slow_links: tuple[tuple[Span, float], ...] = ()
    failed_starts: tuple[tuple[Span, Role], ...] = ()
    seed: int = 0

    def link_share(self, now_s: float) -> float:
        """Share of their rate that links carry now."""
        shares = [share for span, share in self.slow_links if span.holds(now_s)]
        return min(shares, default=1.0)

    def may_start(self, role: Role, when_s: float) -> bool:
        """Whether a worker that is started then comes up."""
        return not any(span.holds(when_s) for span, failed in self.failed_starts if failed is role)

    @classmethod
    def parse(cls, texts: Iterable[str], *, seed: int = 0) -> "Faults":
        """Of what the module's docstring lists.

        Raises:
            ConfigError: one is not written like that, or a span ends before it starts.
        """
        losses: list[tuple[float, Role]] = []
        links: list[tuple[Span, float]] = []
        starts: list[tuple[Span, Role]] = []
        per_hour = 0.0
        for text in texts:
            if found := _LOST_AT.fullmatch(text):
                losses.append((float(found[2]), Role(found[1])))
            elif found := _LOST_PER_HOUR.fullmatch(text):
                per_hour += float(found[1])
            elif (found := _LINK.fullmatch(text)) and 0 < float(found[1]) <= 1:
                links.append((_span(text, found[2], found[3]), float(found[1])))
            elif found := _START.fullmatch(text):
                starts.append((_span(text, found[2], found[3]), Role(found[1])))
            else:
                raise ConfigError(
                    "--fault",
                    f"is {text!r}; known are lost:decode@120, lost:0.5/h, link:0.1@300-600 (a "
                    "share over 0, up to 1) and start:prefill@0-900",
                )
        return cls(tuple(losses), per_hour, tuple(links), tuple(starts), seed)


def _span(text: str, start: str, end: str) -> Span:
    span = Span(float(start), float(end))
    if span.end_s <= span.start_s:
        raise ConfigError("--fault", f"is {text!r}, which ends before it starts")
    return span
