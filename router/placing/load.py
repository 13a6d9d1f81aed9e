"""What placement is told of one worker: what it can hold, what it has to do, what it has cached."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from core.layout import KVLayout
from core.request import WorkerName
from core.worker import WorkerInfo

# Requests of one decode slot: one decodes while the prompt of another is read and moved.
REQUESTS_PER_SLOT = 2
# A prefill worker with so many prompts to read, and so much to do, takes no more: those that wait
# at the router can still be put in another order, and hold no blocks at decode.
ENOUGH_PROMPTS = 8
ENOUGH_BACKLOG_S = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """What one request needs: its prompt, and prompt and answer at their longest."""

    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker that can be used, what it has to do, and what it knows of this prompt.

    max_num_tokens is the longest prompt that it can hold. num_prompts and their num_prompt_tokens
    are still to be read, less what is cached; tokens_per_s is None until it was measured.
    """

    name: WorkerName
    incarnation: str
    layout: KVLayout
    num_prompt_tokens: int
    max_num_tokens: int
    num_cache_blocks: int
    num_prompts: int = 0
    num_cached_tokens: int = 0
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, info: WorkerInfo, num_prompt_tokens: int) -> "PrefillLoad":
        """Of a worker that has so many prompt tokens to read."""
        most, layout = max_tokens_of(info), info.layout
        return cls(info.name, info.incarnation, layout, num_prompt_tokens, most, info.num_blocks)

    @property
    def has_room(self) -> bool:
        """Whether another prompt would be read soon."""
        return is_soon(self.num_prompts, self.num_prompt_tokens, self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode worker that can be used, what it has to do, and what it knows of this prompt.

    max_num_tokens is the longest prompt and answer that it can hold, num_kv_tokens what sequences
    may need of all its blocks. num_prompt_tokens are those that it reads itself.
    """

    name: WorkerName
    incarnation: str
    layout: KVLayout
    num_sequences: int
    max_num_sequences: int
    max_num_tokens: int
    num_cache_blocks: int
    num_kv_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    tokens_per_s: float | None = None
    is_of_session: bool = False

    @classmethod
    def of(cls, info: WorkerInfo, num_sequences: int) -> "DecodeLoad":
        """Of a worker that has so many sequences."""
        return cls(
            info.name,
            info.incarnation,
            info.layout,
            num_sequences,
            info.max_num_sequences,
            max_tokens_of(info),
            info.num_blocks,
        )

    @property
    def num_cache_tokens(self) -> int:
        """Tokens of all its blocks."""
        return self.num_cache_blocks * self.layout.block_size

    def has_room(self, need: Need) -> bool:
        """Whether a slot and blocks will be free by the time that the prompt is read."""
        num_tokens = self.num_kv_tokens + need.num_tokens - self.num_cached_tokens
        is_slot_near = self.num_sequences < REQUESTS_PER_SLOT * self.max_num_sequences
        return self.num_sequences == 0 or (is_slot_near and num_tokens <= self.num_cache_tokens)

    @property
    def near(self) -> int:
        """How many more sequences than the emptiest worker still are a like load."""
        return max(1, self.max_num_sequences // 8)


def is_soon(num_prompts: int, num_prompt_tokens: int, tokens_per_s: float | None) -> bool:
    """Whether a worker with these to read would read one more soon."""
    if tokens_per_s is None or num_prompts < ENOUGH_PROMPTS:
        return True
    return num_prompt_tokens <= ENOUGH_BACKLOG_S * tokens_per_s


def max_tokens_of(info: WorkerInfo) -> int:
    """The longest sequence that a worker can hold."""
    return min(info.max_context_tokens, info.num_blocks * info.layout.block_size)


@dataclass(frozen=True)
class Loads:
    """Both pools as they are now; what is asked of all their workers is looked up once for it."""

    prefill: Sequence[PrefillLoad]
    decode: Sequence[DecodeLoad]

    @cached_property
    def readers(self) -> list[str]:
        """Who reads prompts: incarnations of prefill, or of decode where there is no prefill."""
        return [load.incarnation for load in self.prefill or self.decode]

    @cached_property
    def decoders(self) -> list[str]:
        """Incarnations of decode."""
        return [load.incarnation for load in self.decode]

    @cached_property
    def num_slots(self) -> int:
        """Sequences that decode at once."""
        return sum(load.max_num_sequences for load in self.decode)

    @cached_property
    def num_cache_tokens(self) -> int:
        """Tokens that the decode workers' KV caches hold."""
        return sum(load.num_cache_blocks * load.layout.block_size for load in self.decode)
