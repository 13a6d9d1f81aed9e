"""How decode's KV caches came to be, summed over the finished requests of this router.

A disaggregated cluster that silently computes prompts twice shows here: tokens that were moved,
found cached, or computed at the decode worker; handoffs that were sealed, or failed; running
answers that moved from one decode worker to another.
"""

from collections import Counter
from dataclasses import replace

from core.completion import Completion
from core.errors import TransferFailed, TwophaseError
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
        self._totals = replace(
            totals,
            num_transferred_tokens=totals.num_transferred_tokens + usage.num_transferred_tokens,
            num_decode_cached_tokens=(
                totals.num_decode_cached_tokens + usage.num_decode_cached_tokens
            ),
            num_local_prefill_tokens=(
                totals.num_local_prefill_tokens + usage.num_local_prefill_tokens
            ),
            num_sealed_handoffs=totals.num_sealed_handoffs + (completion.transfer is not None),
        )

    def migrated(self, num_bytes: int) -> None:
        """Count a running answer whose KV cache a stopping decode worker shipped to another."""
        totals = self._totals
        self._totals = replace(
            totals,
            num_migrations=totals.num_migrations + 1,
            num_migrated_bytes=totals.num_migrated_bytes + num_bytes,
        )

    def migration_failed(self, error: TwophaseError) -> None:
        """Count one that did not arrive."""
        reason = error.reason if isinstance(error, TransferFailed) else type(error).__name__
        failed = Counter(dict(self._totals.failed_migrations))
        failed[str(reason)] += 1
        self._totals = replace(self._totals, failed_migrations=tuple(sorted(failed.items())))

    def handoff_failed(self) -> None:
        """Count a request that ended because its KV cache did not arrive."""
        failed = self._totals.num_failed_handoffs + 1
        self._totals = replace(self._totals, num_failed_handoffs=failed)
