"""What a request may still try after a worker failed it, and whom it avoids.

A failed attempt is followed by another on other workers: the prompt goes with the tokens that
were already emitted, so the stream goes on where it stopped. Who is avoided:

- the prefill worker whose call failed, or whose KV cache did not arrive;
- the decode worker that gave the request up for any other reason, or was lost.

A decode worker that stops may hold the answer's KV cache: then the next attempt fetches it there,
and only that one. That is no failure.

A prefill worker that is avoided, or dead, is made up for by another, else by the decode worker,
which then reads the prompt itself; a decode worker can only be made up for by another one. A
worker that comes back is a new incarnation and is not avoided.

Pure: facts in, a decision out.
"""

from dataclasses import dataclass, field

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    InvariantBroken,
    PeerStopping,
    TransferFailed,
    TwophaseError,
)
from core.layout import KVLayout
from core.request import RequestId, WorkerName
from core.settings.router import OnFailure
from router.placing.load import Loads
from router.placing.placement import Placement

# The request itself is at fault, or its time is over: no other worker would do better.
FINAL = (InvalidRequest, DeadlineExceeded, Cancelled, InvariantBroken)


@dataclass(frozen=True, slots=True)
class Origin:
    """A decode worker that stops and holds an answer's KV cache, under the id `held_id`.

    It does so until the cache was fetched, or it is told to cancel that id.
    """

    decode: WorkerName
    incarnation: str
    layout: KVLayout
    held_id: RequestId


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one attempt ended without the whole answer, and whose word that is.

    origin: the worker did not fail it, but holds its KV cache for the next one.
    """

    error: TwophaseError
    is_from_prefill: bool
    origin: Origin | None = None


@dataclass(slots=True)
class Recovery:
    """Attempts of one request.

    Invariants: at most `max_attempts` fail; those that a stopping worker handed over are not
    counted, nor is one for which it could not be fetched what it held. A worker that failed one is
    not in the next. origin is where the next one may fetch its KV cache.
    """

    on_failure: OnFailure
    max_attempts: int
    failures: list[str] = field(default_factory=list)
    last_error: TwophaseError | None = None
    origin: Origin | None = None
    _num_failed: int = 0
    _avoided: set[str] = field(default_factory=set)

    @property
    def may_recompute(self) -> bool:
        """Whether a decode worker may read the prompt where no prefill worker can."""
        return self.on_failure is OnFailure.RESUME

    def failed(self, failure: Failure, placement: Placement) -> None:
        """Note a failed attempt; raises its error when there must not be another."""
        error = failure.error
        pair = f"{placement.prefill or placement.decode} to {placement.decode}"
        if failure.origin is None:
            self.failures.append(f"{pair}: {error}")
        self.last_error, self.origin = error, failure.origin
        is_prefill_avoided = failure.is_from_prefill or isinstance(error, TransferFailed)
        # A worker that stops in order hands over what it has: nothing went wrong with the request,
        # which is read again where that could not be fetched.
        is_unfetched = placement.held_id is not None and is_prefill_avoided
        self._num_failed += not (is_unfetched or isinstance(error, PeerStopping))
        may_go_on = self.on_failure is OnFailure.RESUME and not isinstance(error, FINAL)
        if not may_go_on or self._num_failed >= self.max_attempts:
            raise error
        if placement.prefill is not None and is_prefill_avoided:
            self._avoided.add(placement.prefill_incarnation)
        else:
            self._avoided.add(placement.decode_incarnation)

    def may_use(self, loads: Loads) -> Loads:
        """Those that may be tried."""
        avoided = self._avoided
        if not avoided:
            return loads
        return Loads(
            [load for load in loads.prefill if load.incarnation not in avoided],
            [load for load in loads.decode if load.incarnation not in avoided],
        )
