"""Which prompt prefixes each worker probably holds in its KV cache.

The router notes what it sent where and forgets the oldest first; the workers reuse their blocks
by themselves, so this is a guess. A wrong one costs time, never a token: each worker looks its
blocks up itself. Blocks are told apart by chained hashes as in vLLM's automatic prefix caching;
placing by cached prefix against load follows Preble (2024) and Mooncake (FAST'25).

Pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

import xxhash

# Of one block so many workers are remembered as its holders, those that were sent it last.
MAX_HOLDERS = 16


class PromptBlocks:
    """The full blocks of one prompt as hashes; each stands for itself and all before it.

    The same blocks have other hashes with another `seed`.
    """

    def __init__(self, token_ids: Sequence[int], *, seed: int = 0) -> None:
        self.num_tokens = len(token_ids)
        self._seed = seed
        self._words = array("I", token_ids)
        self._hashes: dict[int, tuple[int, ...]] = {}

    def hashes(self, block_size: int) -> tuple[int, ...]:
        """One hash per full block of `block_size` tokens, in order; computed once."""
        if block_size not in self._hashes:
            self._hashes[block_size] = self._chain(block_size)
        return self._hashes[block_size]

    def _chain(self, block_size: int) -> tuple[int, ...]:
        data, step = self._words.tobytes(), block_size * self._words.itemsize
        chain, before = [], self._seed
        for end in range(step, len(data) + 1, step):
            before = xxhash.xxh3_64_intdigest(data[end - step : end], seed=before)
            chain.append(before)
        return tuple(chain)


class PrefixIndex:
    """Blocks of prompts that were sent to each worker, by incarnation.

    Invariants: of one incarnation no more blocks are remembered than it has; who is remembered as
    a holder of a block has it among its own.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._holders: dict[int, tuple[str, ...]] = {}

    def num_cached_tokens(self, incarnation: str, prompt: PromptBlocks, block_size: int) -> int:
        """Tokens of the longest prefix that the worker was sent before.

        Full blocks only and never the last token, which is always computed for its logits.
        Contract: side-effect free.
        """
        known = self._blocks.get(incarnation)
        if not known:
            return 0
        num_blocks = 0
        for block in prompt.hashes(block_size)[: (prompt.num_tokens - 1) // block_size]:
            if block not in known:
                break
            num_blocks += 1
        return num_blocks * block_size

    def holders(self, prompt: PromptBlocks, block_size: int) -> tuple[str, ...]:
        """Some of the workers that were sent most of the prompt; at most MAX_HOLDERS of them.

        What more workers than that hold draws a request nowhere: the emptiest may well have it.
        """
        found: tuple[str, ...] = ()
        for block in prompt.hashes(block_size):
            holders = self._holders.get(block)
            if not holders:
                break
            found = holders
        return found

    def note(
        self, incarnation: str, prompt: PromptBlocks, block_size: int, num_blocks: int
    ) -> None:
        """The worker, which has `num_blocks` blocks, was sent this prompt."""
        self._sizes[incarnation] = (block_size, num_blocks)
        self.extend(incarnation, prompt)

    def extend(self, incarnation: str, tokens: PromptBlocks) -> None:
        """A worker that was sent prompts before has these tokens, too; others are not noted."""
        if incarnation not in self._sizes:
            return
        block_size, num_blocks = self._sizes[incarnation]
        known = self._blocks.setdefault(incarnation, OrderedDict())
        # Last to first: a prefix is worth more than what follows it, so it is forgotten later.
        for block in reversed(tokens.hashes(block_size)[:num_blocks]):
            if block in known:
                known.move_to_end(block)
                self._holders.setdefault(block, (incarnation,))
                continue
            known[block] = None
            others = self._holders.get(block, ())
            self._holders[block] = (incarnation, *others[: MAX_HOLDERS - 1])
        while len(known) > num_blocks:
            block, _ = known.popitem(last=False)
            self._unhold(block, incarnation)

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget every worker but these: a process that is gone took its cache along."""
        for gone in self._sizes.keys() - set(incarnations):
            for block in self._blocks.pop(gone, ()):
                self._unhold(block, gone)
            del self._sizes[gone]

    def _unhold(self, block: int, incarnation: str) -> None:
        others = tuple(name for name in self._holders.get(block, ()) if name != incarnation)
        if others:
            self._holders[block] = others
        else:
            self._holders.pop(block, None)
