"""How many requests stand where at a decode worker.

Pure.
"""

from collections.abc import Collection
from dataclasses import dataclass

from decode_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Census:
    """All of a worker's requests at one moment.

    num_waiting have no blocks yet, num_reservations have some. num_running: their prompt is
    complete. num_runnable: their next step waits for the device alone, or they are in one.
    num_waiting_tokens of prompts are still to be read here. num_known: all, and those that ended
    while their KV cache is being shipped.
    """

    num_known: int
    num_waiting: int
    num_reservations: int
    num_running: int
    num_runnable: int
    num_waiting_tokens: int

    @classmethod
    def of(
        cls, known: Collection[Sequence], ended: Collection[Sequence], num_in_step: int
    ) -> "Census":
        """Of those that are known, and those that ended and whose blocks are not back."""
        num_reservations = sum(sequence.reservation is not None for sequence in known)
        return cls(
            num_known=len(known) + sum(sequence.is_shipped for sequence in ended),
            num_waiting=len(known) - num_reservations,
            num_reservations=num_reservations,
            num_running=sum(sequence.is_running for sequence in known),
            num_runnable=max(sum(sequence.is_runnable for sequence in known), num_in_step),
            num_waiting_tokens=sum(s.num_remaining_prompt_tokens for s in known if s.is_local),
        )
