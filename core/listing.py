"""What operators are told of a router's workers and requests, one line each."""

from dataclasses import dataclass
from enum import StrEnum

from core.request import RequestId, WorkerName
from core.request_state import RequestState
from core.worker import Role


class WorkerState(StrEnum):
    """Whether a connected worker is given requests.

    draining: nothing new, it stops or was told to. suspect: none for a while, it failed some.
    warming: none while others can serve, until its links are tested.
    """

    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    WARMING = "warming"


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One connected worker as placement sees it; counts are of this router's requests."""

    name: WorkerName
    role: Role
    address: str
    incarnation: str
    state: WorkerState
    num_requests: int
    num_prompt_tokens: int
    max_context_tokens: int
    num_blocks: int
    max_num_sequences: int


@dataclass(frozen=True, slots=True)
class ListedRequest:
    """One request that is inside.

    age_s counts from its receipt, remaining_s to its deadline; None, and num_prompt_tokens 0, while
    its prompt is not yet tokenized. Workers are empty before they were chosen.
    """

    request_id: RequestId
    state: RequestState
    age_s: float
    remaining_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    prefill_worker: WorkerName
    decode_worker: WorkerName
    num_attempts: int
