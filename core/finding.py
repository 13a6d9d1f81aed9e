"""What is concluded from the phases of requests: what one suffered from, and what many did."""

from dataclasses import dataclass
from enum import StrEnum

from core.completion import Completion
from core.request import RequestId


class Symptom(StrEnum):
    """What the client sees."""

    FIRST_TOKEN = "first token late"
    LATER_TOKENS = "later tokens slow"


@dataclass(frozen=True, slots=True)
class Finding:
    """One phase that was slow, and what is known of it.

    seconds: what it took; usual_s: what such requests usually need, None for a wait, which usually
    is none. evidence: the numbers behind it, in words. advice: what to look at or change.
    """

    phase: str
    symptom: Symptom
    seconds: float
    usual_s: float | None
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class PhaseSpread:
    """One phase over many requests, in seconds."""

    phase: str
    p50_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """What several requests suffered from: the phase of `worst`, in all of them together."""

    num_requests: int
    seconds: float
    worst_request_id: RequestId
    worst: Finding


@dataclass(frozen=True, slots=True)
class Explained:
    """One request that ended age_s ago, and what it suffered from, if anything stood out."""

    completion: Completion
    age_s: float
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What lately ended requests suffered from, most seconds first, and all their phases."""

    num_requests: int
    troubles: tuple[Trouble, ...]
    phases: tuple[PhaseSpread, ...]
