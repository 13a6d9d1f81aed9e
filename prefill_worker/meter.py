"""What this worker measures of its own work for those who scale pools.

Pure: facts and times in, `Signals` out. Each value is noted where it happens: waits and steps by
`worker`, handoffs by `service`, bytes by the links.
"""

from collections.abc import Sequence

from core.signals import Signals, Window
from kv_link.link import LinkLoad


class PrefillMeter:
    """Waits, steps and handoffs of the last seconds."""

    def __init__(self) -> None:
        self._waits_s = Window()
        self._tokens = Window()
        self._compute_s = Window()
        self._exposed_s = Window()
        self._tokens_per_s: float | None = None

    def waited(self, seconds: float, now_s: float) -> None:
        """A prompt had waited so long when its first step began."""
        self._waits_s.note(max(seconds, 0.0), now_s)

    def step(self, num_tokens: int, compute_s: float, now_s: float) -> None:
        """A step read `num_tokens` prompt tokens."""
        self._tokens.note(num_tokens, now_s)
        self._compute_s.note(compute_s, now_s)

    def sealed(self, exposed_s: float, now_s: float) -> None:
        """A handoff took so long after its prompt was read."""
        self._exposed_s.note(exposed_s, now_s)

    def signals(
        self, now_s: float, *, oldest_wait_s: float, num_parked: int, links: Sequence[LinkLoad]
    ) -> Signals:
        """All of it, with what the worker and its links hold now.

        How fast it reads is what it did when it last read: a worker that stands still, because
        decode is full, is as fast as before.
        """
        tokens_per_s, busy_share = self._tokens.per_s(now_s), self._compute_s.per_s(now_s)
        if tokens_per_s and busy_share:
            self._tokens_per_s = tokens_per_s / busy_share
        return Signals(
            queue_wait_p50_s=self._waits_s.quantile(0.5, now_s),
            queue_wait_p95_s=self._waits_s.quantile(0.95, now_s),
            oldest_wait_s=oldest_wait_s,
            num_parked=num_parked,
            tokens_per_s=self._tokens_per_s,
            num_in_flight_bytes=sum(link.num_in_flight_bytes for link in links),
            bytes_per_s=_sum([link.bytes_per_s for link in links]),
            max_bytes_per_s=_sum([link.max_bytes_per_s for link in links]),
            transfer_wait_s=self._exposed_s.mean(now_s),
        )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
