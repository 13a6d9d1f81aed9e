"""Who is refused early: a request whose deadline is known to be lost.

A request for which no worker has room waits in line (`placing`), which is bounded in time and
length. One that cannot be begun before its deadline by what was measured is refused at once:
sooner is kinder, and its place helps others. How many may be inside is bounded by `running`.

Pure.
"""

from dataclasses import dataclass

from core.errors import Overloaded

# What a refused client is told to wait while nothing was measured.
UNKNOWN_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is to be done before a new request, and how fast both pools do it together.

    num_sequences and num_kv_tokens count those that decode, or will, up to and with the new one;
    decode_s is how long one holds its slot. Rates are None until they were measured.
    """

    num_prompt_tokens: int
    prefill_tokens_per_s: float | None
    num_link_bytes: int
    link_bytes_per_s: float | None
    num_sequences: int
    num_slots: int
    num_kv_tokens: int
    num_cache_tokens: int
    decode_s: float | None

    @property
    def wait_s(self) -> float | None:
        """Predicted seconds until work on the new request begins; None if nothing was measured.

        KV blocks travel while the next chunk is computed, so of prefill and link only the slower
        one counts; a decode slot, or its blocks, come free after that.
        """
        prefill_s = _quotient(self.num_prompt_tokens, self.prefill_tokens_per_s)
        link_s = _quotient(self.num_link_bytes, self.link_bytes_per_s)
        waits = (prefill_s, link_s, self.decode_s)
        if waits == (None, None, None):
            return None
        return max(prefill_s or 0.0, link_s or 0.0) + self._num_turns * (self.decode_s or 0.0)

    @property
    def _num_turns(self) -> float:
        """How many times all slots, or all blocks, have to come free first."""
        slots = self.num_sequences / max(self.num_slots, 1)
        blocks = self.num_kv_tokens / max(self.num_cache_tokens, 1)
        return max(slots - 1.0, blocks - 1.0, 0.0)


def refuse_if_late(backlog: Backlog, *, deadline_s: float, now_s: float) -> None:
    """Refuse a request that by all that was measured cannot be begun in time.

    Raises:
        Overloaded: with the predicted wait.
    """
    wait_s = backlog.wait_s
    if wait_s is not None and now_s + wait_s >= deadline_s and wait_s > 0:
        left_s = max(deadline_s - now_s, 0.0)
        raise Overloaded(
            f"{wait_s:.1f} s of work are ahead of it, and its deadline is in {left_s:.1f} s",
            retry_after_s=wait_s,
        )


def _quotient(amount: float, per_s: float | None) -> float | None:
    return None if per_s is None else amount / per_s
