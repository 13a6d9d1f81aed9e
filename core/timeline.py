"""Where the time of one request went, in phases that add up to the whole.

Each phase is measured by the code that waited or computed: the router measures tokenize, place,
recovery, reserve and delivery; the prefill worker queue, prefill and exposed transfer; the decode
worker slot wait and decode. Only durations make phases, so no two clocks are ever compared. The
events that a report comes with show the same in detail (`core.events`). What the phases do not
cover (hops between processes) is shown as `unaccounted_s`, never hidden.
"""

from dataclasses import dataclass, fields

from core.events.event import Event
from core.request import RequestId


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of each phase of one request, and the whole.

    tokenize          prompt text to token ids
    place             admission, the wait in line and the choice of workers; of a further answer to
                      the same prompt also the wait until the first one has its KV cache
    recovery          attempts that a worker failed, until the last one was placed
    reserve           router asks decode for blocks, until decode grants them
    queue             waiting at the prefilling worker, also between two chunks
    prefill           computing the chunks
    exposed_transfer  after the last chunk until the KV cache is sealed at decode
    slot_wait         sealed, waiting for the next decode step to begin
    decode            first decode step begins, until the last token is sampled; for an answer that
                      the router ended (stop string): first to last token's arrival there
    delivery          last token's arrival at the router, until it is handed to the transport
    """

    tokenize_s: float = 0.0
    place_s: float = 0.0
    recovery_s: float = 0.0
    reserve_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    exposed_transfer_s: float = 0.0
    slot_wait_s: float = 0.0
    decode_s: float = 0.0
    delivery_s: float = 0.0
    total_s: float = 0.0
    time_to_first_token_s: float = 0.0

    @property
    def accounted_s(self) -> float:
        """Sum of the phases."""
        return sum(seconds for _, seconds in self.items())

    @property
    def unaccounted_s(self) -> float:
        """What no phase covers: the hops between processes."""
        return self.total_s - self.accounted_s

    def items(self) -> list[tuple[str, float]]:
        """(name, seconds) of each phase in the order in which they happen."""
        names = [f.name for f in fields(self) if f.name not in _WHOLES]
        return [(name.removesuffix("_s"), getattr(self, name)) for name in names]


_WHOLES = ("total_s", "time_to_first_token_s")


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefilling worker measured of one request."""

    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    num_chunks: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the prefill worker measured of one handoff: bytes acknowledged by decode.

    push_s is from the first byte sent to the seal; exposed_s the part after the last chunk.
    """

    backend: str
    num_bytes: int
    num_pieces: int
    push_s: float
    exposed_s: float
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest wait between two tokens of an answer at its decode worker, and what ran in it.

    index is the place in the answer of the token after it. Of gap_s, the worker's steps took
    step_s. Its last step decoded num_sequences sequences and read the KV of num_history_tokens.
    In it num_prompt_tokens of prompts were read; prompts names whose, most tokens first.
    """

    index: int
    gap_s: float
    step_s: float
    num_sequences: int
    num_history_tokens: int
    num_prompt_tokens: int
    prompts: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What the decode worker measured of one request.

    step_s: the steps that made its tokens, summed; the means are over those steps. prompt_gap_s:
    those of its gaps in which prompts were read.
    """

    slot_wait_s: float
    decode_s: float
    step_s: float = 0.0
    mean_num_sequences: float = 0.0
    mean_num_history_tokens: float = 0.0
    prompt_gap_s: float = 0.0
    longest_gap: Gap | None = None
    events: tuple[Event, ...] = ()
