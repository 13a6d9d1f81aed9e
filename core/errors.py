"""Every failure that twophase names, as one tree.

::

    TwophaseError
    |-- InvalidRequest      the caller must change the request (field, value, limit)
    |   |-- DuplicateRequest  a request of that id is running
    |   `-- PromptTooLong     the prompt leaves no room for an answer
    |-- Unauthenticated     the caller showed no key or secret that is known
    |-- PermissionDenied    the caller is known, and may not do this
    |-- Overloaded          a bound was reached; may be tried again after `retry_after_s`
    |-- DeadlineExceeded    the request's own deadline passed
    |-- Cancelled           the caller went away
    |-- PeerLost            a worker or a router died or fell silent
    |   `-- PeerStopping    a worker stops in order, and hands over what it has
    |-- DeviceLost          the device fails every step; the process that has it ends
    |-- TransferFailed      a handoff did not arrive whole (reason: TransferFailure)
    |-- LayoutMismatch      two workers hold KV blocks of different shapes
    |-- ConfigError         the configuration cannot be used (path, problem, suggestion)
    |-- ModelError          a model directory is missing, unreadable or unsupported
    `-- InvariantBroken     a bug; the process that finds it stops

Errors carry fields, not only text. `twophase.errors` holds the one table that maps them to gRPC
status codes and back.
"""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.completion import Completion


class TwophaseError(Exception):
    """Root of the tree; `str(error)` is one line for people.

    completion is what was known of the request that it ended; None if it ended none.
    """

    completion: "Completion | None" = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by fields, whatever the constructor takes: errors cross process borders."""
        return _restore, (type(self), self.args, vars(self))


def _restore(
    kind: type[TwophaseError], args: tuple[object, ...], fields: dict[str, object]
) -> TwophaseError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class InvalidRequest(TwophaseError):
    """A field of the request holds a value that is refused."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {value}: {limit}")
        self.field = field
        self.value = str(value)
        self.limit = limit


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context with one token of answer."""


class Unauthenticated(TwophaseError):
    """The caller showed no key or secret, or one that is not known; never says which."""


class PermissionDenied(TwophaseError):
    """The caller is known, and may not do this."""


class DuplicateRequest(InvalidRequest):
    """The id belongs to a request that is running."""

    def __init__(self, request_id: str) -> None:
        super().__init__("request_id", request_id, "is in use")


class Overloaded(TwophaseError):
    """A bound was reached; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TwophaseError):
    """The deadline that came with the request passed."""


class Cancelled(TwophaseError):
    """The caller cancelled the request or went away."""


class PeerLost(TwophaseError):
    """The worker named `peer` died, fell silent or closed its stream."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer} was lost: {why}")
        self.peer = peer
        self.why = why


class PeerStopping(PeerLost):
    """The worker named `peer` stops in order: nothing failed, but others have to go on."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer, "it is stopping")


class TransferFailure(StrEnum):
    """Why a handoff did not arrive whole."""

    CHECKSUM = "checksum"
    MISSING_PIECES = "missing_pieces"
    STALE_EPOCH = "stale_epoch"
    LEASE_EXPIRED = "lease_expired"
    LINK_LOST = "link_lost"
    REFUSED = "refused"
    ABORTED = "aborted"


class DeviceLost(TwophaseError):
    """A device fails every step that it is given."""


class TransferFailed(TwophaseError):
    """A handoff ended without proven KV blocks at the decode worker."""

    def __init__(self, reason: TransferFailure, detail: str) -> None:
        super().__init__(f"KV transfer failed ({reason}): {detail}")
        self.reason = reason
        self.detail = detail


class LayoutMismatch(TwophaseError):
    """Two workers would exchange KV blocks of different layouts."""

    def __init__(self, differences: str) -> None:
        super().__init__(f"KV layouts differ: {differences}")
        self.differences = differences


class ConfigError(TwophaseError):
    """The configuration at `path` (dotted) cannot be used."""

    def __init__(self, path: str, problem: str, suggestion: str | None = None) -> None:
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        super().__init__(f"{path}: {problem}{hint}")
        self.path = path
        self.problem = problem
        self.suggestion = suggestion


class ModelError(TwophaseError):
    """A model cannot be found, read or run."""


class InvariantBroken(TwophaseError):
    """Something that must always hold did not; the device loop that finds it stops its process."""


def word_of(error: BaseException) -> str:
    """What kind of error it is, as a label: invalid_request, ...; internal for what is no kind."""
    name = type(error).__name__ if isinstance(error, TwophaseError) else "internal"
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
