"""How decode's KV caches came to be, summed over the finished requests of this router.

A disaggregated cluster that silently computes prompts twice shows here: tokens that were moved,
found cached, or computed at the decode worker; handoffs that were sealed, or failed; running
answers that moved from one decode worker to another.
"""

from collections import Counter
from dataclasses import replace

from core.completion import Completion
from core.errors import TransferFailed, TwophaseError, word_of
from core.worker import KvTotals
from router.placing.placement import Placement


class KvCounters:
    """Counts that only grow."""

    def __init__(self) -> None:
        self._totals = KvTotals()
        self._failures: Counter[tuple[str, str, str]] = Counter()

    @property
    def failures(self) -> dict[tuple[str, str, str], int]:
        """Failed attempts by prefill worker (empty without one), decode worker and reason."""
        return dict(self._failures)

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
        failed = Counter(dict(self._totals.failed_migrations))
        failed[_reason(error)] += 1
        self._totals = replace(self._totals, failed_migrations=tuple(sorted(failed.items())))

    def attempt_failed(self, placement: Placement, error: TwophaseError) -> None:
        """Count an attempt that a worker failed, and in it a KV cache that did not arrive."""
        is_handoff = isinstance(error, TransferFailed)
        self._failures[placement.prefill or "", placement.decode, _reason(error)] += 1
        failed = self._totals.num_failed_handoffs + is_handoff
        self._totals = replace(self._totals, num_failed_handoffs=failed)


def _reason(error: TwophaseError) -> str:
    return str(error.reason) if isinstance(error, TransferFailed) else word_of(error)
