"""What the router is asked for: how often, how long the prompts are, how long answers decode.

Those who scale pools are told (`snapshot`). Requests that workers failed are counted once, when
they came. Those that are turned away for want of room were asked for, too, but are in no line.

Pure: facts and times in, a Demand out.
"""

from collections.abc import Iterable

from core.signals import Demand, Window
from router.placing.fairness import Ticket

# With fewer gaps their spread says nothing; random arrivals have 1.
MIN_GAPS = 16


class DemandMeter:
    """Arrivals, prompts and answers of the last seconds."""

    def __init__(self, now_s: float) -> None:
        self._started_s = self._busy_until_s = now_s
        self._arrived_s: float | None = None
        self._gaps_s = Window()
        self._arrivals = Window()
        self._prompt_tokens = Window()
        self._decode_s = Window()

    def arrived(self, now_s: float) -> None:
        """A request came; whether it can be taken or not."""
        if self._arrived_s is not None:
            self._gaps_s.note(now_s - self._arrived_s, now_s)
        self._arrived_s = self._busy_until_s = now_s
        self._arrivals.note(1.0, now_s)

    def read(self, num_tokens: int, now_s: float) -> None:
        """A prompt was read, of which `num_tokens` had to be computed."""
        self._prompt_tokens.note(num_tokens, now_s)

    def answered(self, decode_s: float, now_s: float) -> None:
        """An answer held its slot for `decode_s`."""
        self._decode_s.note(decode_s, now_s)
        self._busy_until_s = now_s

    def snapshot(self, line: Iterable[Ticket], now_s: float, *, is_idle: bool) -> Demand:
        """The demand now; `line` holds those that wait, is_idle says that nothing is under way."""
        tickets = list(line)
        if tickets or not is_idle:
            self._busy_until_s = now_s
        span_s = min(self._arrivals.covered_s(now_s), max(now_s - self._started_s, 1.0))
        gaps = self._gaps_s.moments(now_s)
        has_spread = gaps is not None and self._gaps_s.num_values(now_s) >= MIN_GAPS
        return Demand(
            requests_per_s=self._arrivals.num_values(now_s) / span_s,
            arrival_scv=gaps.scv if gaps is not None and has_spread else 1.0,
            num_prompt_tokens=self._prompt_tokens.moments(now_s),
            decode_s=self._decode_s.moments(now_s),
            num_in_line=len(tickets),
            num_line_tokens=sum(ticket.num_prompt_tokens for ticket in tickets),
            oldest_in_line_s=max((now_s - t.arrived_s for t in tickets), default=0.0),
            idle_s=now_s - self._busy_until_s,
        )
