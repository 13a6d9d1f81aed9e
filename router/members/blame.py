"""Whose fault a failed attempt may be.

- a handoff that did not arrive: both ends, since neither can tell; the one that is sound is
  cleared by its next success with somebody else;
- a lost peer: the worker that it names;
- what is the request's own fault, a bound that was reached, or an orderly stop: nobody's;
- all else: the worker that said it.

Pure.
"""

from core.errors import Overloaded, PeerLost, PeerStopping, TransferFailed
from router.members.member import Member
from router.placing.recovery import FINAL, Failure

BLAMELESS = (*FINAL, Overloaded, PeerStopping)


def blamed(failure: Failure, prefill: Member | None, decode: Member | None) -> list[Member]:
    """Which of the workers of an attempt, None where one is gone, to count its failure against."""
    error = failure.error
    ends = [member for member in (prefill, decode) if member is not None]
    if isinstance(error, BLAMELESS):
        return []
    if isinstance(error, TransferFailed):
        return ends
    if isinstance(error, PeerLost):
        named = [m for m in ends if error.peer in (m.info.name, m.peer.address)]
        if named:
            return named
    teller = prefill if failure.is_from_prefill else decode
    return [teller] if teller is not None else []
