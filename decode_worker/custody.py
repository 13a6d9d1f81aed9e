"""The blocks of sequences, and when those of a sequence that ended go back to the pool.

    ended --+-- a writer may still reach them    quarantine, until its handoff is fenced
            +-- a handoff still reads them       kept, until that is closed
            +-- the running step uses them       kept, until it ends: the worker calls again then
            `-- else                             back at once

Full blocks stay findable in the prefix index. Pure bookkeeping in the event loop's thread.
"""

from core.request import RequestId
from decode_worker.sequence import Sequence
from engine.block_pool import BlockPool


class Custody:
    """Blocks that may be touched although nobody waits for their request.

    Invariants: blocks are given back once; those that a handoff reads or an unfenced writer may
    reach, never. is_news: since it was reset some came free, or can be found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.is_news = False
        self._pool = pool
        self._fenced: dict[tuple[RequestId, int], Sequence] = {}
        self._shipped: dict[str, Sequence] = {}

    @property
    def left(self) -> list[Sequence]:
        """Sequences that ended and whose blocks are not back."""
        shipped = [sequence for sequence in self._shipped.values() if sequence.is_ended]
        return [*self._fenced.values(), *shipped]

    @property
    def num_shipped(self) -> int:
        """Sequences whose blocks a handoff reads."""
        return len(self._shipped)

    def publish(self, sequence: Sequence) -> None:
        """Let others find what is computed."""
        assert sequence.reservation is not None
        self.is_news = True
        num_tokens = sequence.num_computed_tokens
        self._pool.publish(sequence.token_ids, sequence.reservation.block_ids, num_tokens)

    def give_back(self, sequence: Sequence) -> None:
        """An ended sequence needs its blocks no more, and no step uses them."""
        if sequence.is_shipped:
            return
        assert sequence.reservation is not None
        self.publish(sequence)
        self._pool.release(sequence.reservation.block_ids)

    def quarantine(self, sequence: Sequence) -> None:
        """A sequence ended before its handoff had: `lift` frees what that may write into."""
        assert sequence.reservation is not None
        self._pool.quarantine(sequence.reservation.fresh_block_ids)
        self._pool.release(sequence.reservation.block_ids[: sequence.reservation.num_shared])
        self._fenced[sequence.request.request_id, sequence.epoch] = sequence

    def lift(self, request_id: RequestId, epoch: int) -> None:
        """The writer is fenced."""
        sequence = self._fenced.pop((request_id, epoch))
        assert sequence.reservation is not None
        self._pool.lift_quarantine(sequence.reservation.fresh_block_ids)
        self.is_news = True

    def ship(self, session_id: str, sequence: Sequence) -> tuple[int, ...]:
        """The blocks, which a handoff of that session reads from now on."""
        assert sequence.reservation is not None
        sequence.is_shipped = True
        self._shipped[session_id] = sequence
        return sequence.reservation.block_ids

    def try_end_shipping(self, session_id: str) -> Sequence | None:
        """Whose blocks the session's handoff read, which is closed; None if none did."""
        sequence = self._shipped.pop(session_id, None)
        if sequence is not None:
            sequence.is_shipped = False
        return sequence
