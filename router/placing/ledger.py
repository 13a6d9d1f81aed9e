"""What this router has given each worker and what is left of it.

    placed --read--> the prompt is read --shipped--> its KV cache moved --end--> nothing is left

A request counts from the moment it was placed, not from its worker's first answer, so that two
that are placed in one turn see each other.

Pure.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat


@dataclass(eq=False, slots=True)
class Work:
    """One placed request, by incarnations of its workers.

    reader reads the prompt; it is the decode worker where no KV cache is moved. num_prompt_tokens
    and num_kv_tokens leave out the prefix that reader, or decode, is thought to have.
    """

    reader: str
    decode: str
    num_prompt_tokens: int
    num_kv_tokens: int
    num_bytes: int
    is_read: bool = False
    is_shipped: bool = False
    is_ended: bool = False

    @property
    def link(self) -> tuple[str, str]:
        """(prefill, decode) of the handoff."""
        return (self.reader, self.decode)


class Ledger:
    """Sums over the work that has not ended, by incarnation.

    Invariant: once all work has ended every sum is zero, and nothing is remembered.
    """

    def __init__(self) -> None:
        self._num_prompts: Counter[str] = Counter()
        self._num_prompt_tokens: Counter[str] = Counter()
        self._num_sequences: Counter[str] = Counter()
        self._num_kv_tokens: Counter[str] = Counter()
        self._num_bytes = 0

    def num_prompts(self, worker: str) -> int:
        """Prompts that `worker` has not read to the end."""
        return self._num_prompts.get(worker, 0)

    def num_prompt_tokens(self, worker: str) -> int:
        """Tokens of those prompts."""
        return self._num_prompt_tokens.get(worker, 0)

    def num_sequences(self, worker: str) -> int:
        """Requests that decode at `worker`, or will."""
        return self._num_sequences.get(worker, 0)

    def num_kv_tokens(self, worker: str) -> int:
        """Tokens that these requests may need in its KV cache."""
        return self._num_kv_tokens.get(worker, 0)

    def num_all_prompt_tokens(self, workers: Iterable[str]) -> int:
        """Tokens of all prompts that these workers have not read to the end."""
        return _sum(self._num_prompt_tokens, workers)

    def num_all_sequences(self, workers: Iterable[str]) -> int:
        """Requests that decode at one of these workers, or will."""
        return _sum(self._num_sequences, workers)

    def num_all_kv_tokens(self, workers: Iterable[str]) -> int:
        """Tokens that these requests may need in their KV caches."""
        return _sum(self._num_kv_tokens, workers)

    @property
    def num_all_bytes(self) -> int:
        """KV bytes that are still to cross any link."""
        return self._num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not (
            self._num_prompts
            or self._num_prompt_tokens
            or self._num_sequences
            or self._num_kv_tokens
            or self._num_bytes
        )

    def begin(self, work: Work) -> None:
        """`work` was placed; called once."""
        self._num_prompts[work.reader] += 1
        self._num_prompt_tokens[work.reader] += work.num_prompt_tokens
        self._num_sequences[work.decode] += 1
        self._num_kv_tokens[work.decode] += work.num_kv_tokens
        self._num_bytes += work.num_bytes

    def read(self, work: Work) -> None:
        """Its prompt is read; idempotent."""
        if not work.is_read:
            work.is_read = True
            _take(self._num_prompts, work.reader, 1)
            _take(self._num_prompt_tokens, work.reader, work.num_prompt_tokens)

    def shipped(self, work: Work) -> None:
        """Its KV cache is at decode; idempotent."""
        if not work.is_shipped:
            work.is_shipped = True
            self._num_bytes -= work.num_bytes

    def end(self, work: Work) -> None:
        """It holds nothing any more, however far it came; idempotent."""
        if work.is_ended:
            return
        work.is_ended = True
        self.read(work)
        self.shipped(work)
        _take(self._num_sequences, work.decode, 1)
        _take(self._num_kv_tokens, work.decode, work.num_kv_tokens)


def _sum(counter: Counter[str], keys: Iterable[str]) -> int:
    # A router looks at every worker for each request: this takes a third of a generator's time.
    return sum(map(counter.get, keys, repeat(0)))


def _take(counter: Counter[str], key: str, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
