"""Who holds which KV block, which life of the block this is, and which prefixes it can serve.

Owns the bookkeeping of the blocks of one cache: reference counts, epochs, the free queue, the
prefix index and the quarantine. Knows nothing of tensors, requests, leases or transfers, does no
I/O and takes no lock: one thread owns a pool. The life of a block::

    free --reserve--> held --release--> free (findable by its prefix until it is reserved again)
                        |
                        `--quarantine--> quarantined --lift_quarantine--> free

Paging and prefix caching follow vLLM (PagedAttention, SOSP'23, s.4.2 to 4.4; its automatic prefix
caching for the chained block hash). Here blocks are append-only: a full block is never written
again in the same life, so there is no copy-on-write.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import InvariantBroken

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside for one sequence.

    The first `num_shared` of `block_ids` were found by prefix and may only be read; the others
    are fresh, bear `epoch`, and belong to the holder alone.
    """

    epoch: int
    block_ids: tuple[int, ...]
    num_shared: int

    @property
    def fresh_block_ids(self) -> tuple[int, ...]:
        """Blocks that the holder may write."""
        return self.block_ids[self.num_shared :]


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Where the blocks are: total = free + used + quarantined; `cached` is a part of `free`."""

    total: int
    free: int
    cached: int
    used: int
    quarantined: int


class BlockPool:
    """Allocator and prefix index of `num_blocks` blocks of `block_size` tokens.

    Invariants: a block's reference count is the number of block tables that hold it. A block is in
    exactly one place: held (count over 0), in the free queue, or quarantined. The free queue runs
    from the block to reuse first to the one to reuse last. Each digest in the index names one
    block, each indexed block bears one digest, and no quarantined block is indexed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._epoch = 0
        self._epochs = [0] * num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._quarantined: set[int] = set()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the KV of the longest known prefix of `token_ids`, in order.

        Full blocks only, and never the last token, which has to be computed for its logits. The
        answer holds until the next call that changes the pool. Contract: side-effect free.
        """
        num_full = (len(token_ids) - 1) // self.block_size
        found = []
        for digest in self._digests(token_ids, num_full):
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def reserve(self, num_blocks: int, *, shared: Sequence[int] = ()) -> Reservation | None:
        """Take `shared` blocks (from `match_prefix`) and `num_blocks` fresh ones, or nothing.

        None means that too few blocks are free; nothing has changed then. Fresh blocks lose their
        place in the prefix index and bear a new epoch, higher than any before; shared ones keep
        theirs. Contract: caller keeps ownership until `release` or `quarantine`.
        """
        self._check_shared(shared)
        num_revived = sum(block_id in self._free for block_id in shared)
        if num_blocks > len(self._free) - num_revived:
            return None
        for block_id in shared:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        self._epoch += 1
        fresh = [self._take_free() for _ in range(num_blocks)]
        return Reservation(self._epoch, (*shared, *fresh), len(shared))

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; the last reference frees it.

        An indexed block stays findable until it is reserved again. Of one call, later blocks are
        reused before earlier ones, since a prefix is worth more than what follows it. Contract:
        called once per reference.
        """
        for block_id in reversed(block_ids):
            self._require_held(block_id, "released")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=block_id in self._digest_of)

    def publish(self, token_ids: Sequence[int], block_ids: Sequence[int], num_tokens: int) -> None:
        """Make the full blocks that hold the KV of the first `num_tokens` tokens findable.

        `block_ids` is the sequence's block table. A prefix that another block already serves
        keeps that block. Contract: idempotent; caller keeps ownership.
        """
        num_full = min(num_tokens, len(token_ids)) // self.block_size
        digests = self._digests(token_ids, num_full)
        for block_id, digest in zip(block_ids, digests, strict=False):
            self._require_held(block_id, "published")
            if digest in self._block_of:
                continue
            if block_id in self._digest_of:
                raise InvariantBroken(f"block {block_id} was published with other tokens")
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Move blocks from their only holder to nobody, out of reach until lifted.

        For the fresh blocks of an aborted reservation whose writer may still write. Contract:
        called once per block.
        """
        for block_id in block_ids:
            self._require_held(block_id, "quarantined")
            if self._ref_counts[block_id] > 1:
                raise InvariantBroken(f"block {block_id} has other holders: not quarantined")
            self._ref_counts[block_id] = 0
            self._forget(block_id)
            self._quarantined.add(block_id)

    def lift_quarantine(self, block_ids: Sequence[int]) -> None:
        """Free quarantined blocks: their writer is fenced. Contract: called once per block."""
        for block_id in block_ids:
            if block_id not in self._quarantined:
                raise InvariantBroken(f"block {block_id} is not in quarantine")
            self._quarantined.remove(block_id)
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def epoch_of(self, block_id: int) -> int:
        """Epoch of the block's latest reservation; 0 if it never had one."""
        return self._epochs[block_id]

    def forget_prefixes(self) -> None:
        """Empty the prefix index; no block changes hands."""
        self._block_of.clear()
        self._digest_of.clear()

    def counts(self) -> BlockCounts:
        """How many blocks are where. Contract: side-effect free."""
        free, quarantined = len(self._free), len(self._quarantined)
        return BlockCounts(
            total=self.num_blocks,
            free=free,
            cached=sum(block_id in self._free for block_id in self._digest_of),
            used=self.num_blocks - free - quarantined,
            quarantined=quarantined,
        )

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        self._epochs[block_id] = self._epoch
        return block_id

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]

    def _check_shared(self, shared: Sequence[int]) -> None:
        if len(set(shared)) != len(shared):
            raise InvariantBroken(f"a block is shared twice in one reservation: {list(shared)}")
        for block_id in shared:
            if block_id not in self._digest_of:
                raise InvariantBroken(f"block {block_id} is in no prefix: it cannot be shared")

    def _require_held(self, block_id: int, verb: str) -> None:
        if self._ref_counts[block_id] == 0:
            raise InvariantBroken(f"block {block_id} is held by nobody: it cannot be {verb}")

    def _digests(self, token_ids: Sequence[int], num_blocks: int) -> Iterator[bytes]:
        """Chained digests: each names its block's tokens and all tokens before them."""
        tokens = np.asarray(token_ids[: num_blocks * self.block_size], dtype=np.int64)
        parent = b""
        for row in tokens.reshape(num_blocks, self.block_size):
            parent = hashlib.blake2b(parent + row.tobytes(), digest_size=DIGEST_BYTES).digest()
            yield parent
