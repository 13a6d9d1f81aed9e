"""How many requests may be inside at once; more are refused at the door, never queued unbounded."""

from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import InvalidRequest, Overloaded
from core.request import RequestId


class Admission:
    """The requests between their first and last message.

    Invariant: an id is inside at most once, and leaves exactly once.
    """

    def __init__(self, max_active_requests: int) -> None:
        self._max_active_requests = max_active_requests
        self._active: set[RequestId] = set()

    @property
    def num_active_requests(self) -> int:
        """Requests inside."""
        return len(self._active)

    def is_active(self, request_id: RequestId) -> bool:
        """Whether the request is inside."""
        return request_id in self._active

    @contextmanager
    def admitted(self, request_id: RequestId) -> Iterator[None]:
        """Hold a place for the request while the context lasts.

        Raises:
            InvalidRequest: a request with this id is inside.
            Overloaded: as many requests are inside as may be.
        """
        if request_id in self._active:
            raise InvalidRequest("request_id", request_id, "is in use")
        if len(self._active) >= self._max_active_requests:
            raise Overloaded(f"{self._max_active_requests} requests are active")
        self._active.add(request_id)
        try:
            yield
        finally:
            self._active.remove(request_id)
