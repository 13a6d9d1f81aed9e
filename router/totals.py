"""How decode's KV caches came to be, summed over the finished requests of this router.

A disaggregated cluster that silently computes prompts twice shows here: tokens that were moved,
found cached, or computed at the decode worker; handoffs that were sealed, or failed.
"""

from dataclasses import replace

from core.completion import Completion
from core.worker import KvTotals


class KvCounters:
    """Counts that only grow."""

    def __init__(self) -> None:
        self._totals = KvTotals()

    @property
    def totals(self) -> KvTotals:
        """The counts so far."""
        return self._totals

    def finished(self, completion: Completion) -> None:
        """Count a request that ended well."""
        usage, totals = completion.usage, self._totals
        self._totals = KvTotals(
            num_transferred_tokens=totals.num_transferred_tokens + usage.num_transferred_tokens,
            num_decode_cached_tokens=(
                totals.num_decode_cached_tokens + usage.num_decode_cached_tokens
            ),
            num_local_prefill_tokens=(
                totals.num_local_prefill_tokens + usage.num_local_prefill_tokens
            ),
            num_sealed_handoffs=totals.num_sealed_handoffs + (completion.transfer is not None),
            num_failed_handoffs=totals.num_failed_handoffs,
        )

    def handoff_failed(self) -> None:
        """Count a request that ended because its KV cache did not arrive."""
        failed = self._totals.num_failed_handoffs + 1
        self._totals = replace(self._totals, num_failed_handoffs=failed)
