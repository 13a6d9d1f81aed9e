"""What operators call: the part of the public clients that lists and drains.

Reached as `Client.admin` and `AsyncClient.admin`; uses their connection.
"""

from typing import Any

from core.events.step import StepFacts
from core.events.timeline import Timeline
from core.finding import Diagnosis, Explained
from core.listing import ListedRequest, ListedWorker
from core.request import WorkerName
from core.settings.router import RouterConfig
from twophase.client.calls import call, call_async, call_stream
from twophase.event_wire import step_from_wire
from twophase.listing_wire import listed_request_from_wire, listed_worker_from_wire
from twophase.policy_wire import policy_to_wire
from twophase.report_wire import diagnosis_from_wire, finding_from_wire
from twophase.timeline_wire import timeline_from_wire
from twophase.v1 import admin_pb2 as pb
from twophase.wire import completion_from_wire

TIMEOUT_S = 5.0
ADD_TIMEOUT_S = 30.0
LIST_TIMEOUT_S = 30.0


class Admin:
    """Blocking calls; the client keeps ownership of the connection."""

    def __init__(self, stub: Any, address: str) -> None:  # Any: stubs have no types of their own
        self._stub = stub
        self._address = address

    def workers(self, *, timeout_s: float = TIMEOUT_S) -> list[ListedWorker]:
        """The connected workers as placement sees them."""
        reply = call(self._address, self._stub.ListWorkers, pb.ListWorkersRequest(), timeout_s)
        return [listed_worker_from_wire(worker) for worker in reply.workers]

    def requests(self, *, timeout_s: float = TIMEOUT_S) -> list[ListedRequest]:
        """The requests that are inside, oldest first."""
        reply = call(self._address, self._stub.ListRequests, pb.ListRequestsRequest(), timeout_s)
        return [listed_request_from_wire(request) for request in reply.requests]

    def add_worker(self, address: str, *, timeout_s: float = ADD_TIMEOUT_S) -> WorkerName:
        """Make a worker known to the router; returns its name once it is connected."""
        request = pb.AddWorkerRequest(address=address)
        return WorkerName(call(self._address, self._stub.AddWorker, request, timeout_s).name)

    def remove_worker(self, address: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Make the router forget a worker; idempotent."""
        request = pb.RemoveWorkerRequest(address=address)
        call(self._address, self._stub.RemoveWorker, request, timeout_s)

    def drain(self, name: str, *, timeout_s: float = TIMEOUT_S) -> int:
        """Have a worker be given nothing new; returns how many requests it still serves.

        Raises:
            InvalidRequest: no worker of that name is connected.
        """
        reply = call(self._address, self._stub.Drain, pb.DrainRequest(name=name), timeout_s)
        return int(reply.num_requests)

    def explain(self, request_id: str, *, timeout_s: float = TIMEOUT_S) -> Explained:
        """Which phase of a request that ended was slow, and why.

        Raises:
            InvalidRequest: the router does not remember it.
        """
        message = pb.ExplainRequest(request_id=request_id)
        return _explained(call(self._address, self._stub.Explain, message, timeout_s))

    def diagnose(self, window_s: float = 0.0, *, timeout_s: float = TIMEOUT_S) -> Diagnosis:
        """Which phases were slow in what ended within the last `window_s`; 0 for all remembered."""
        message = pb.DiagnoseRequest(window_s=window_s)
        return diagnosis_from_wire(call(self._address, self._stub.Diagnose, message, timeout_s))

    def note_scaling(self, sentence: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Tell what was decided about the sizes of the pools, for whoever looks at the page."""
        message = pb.NoteScalingRequest(sentence=sentence)
        call(self._address, self._stub.NoteScaling, message, timeout_s)

    def timeline(self, request_id: str, *, timeout_s: float = TIMEOUT_S) -> Timeline:
        """What happened to a request, when and where; also of one that is running.

        Raises:
            InvalidRequest: the router does not know it (any more).
        """
        message = pb.GetTimelineRequest(request_id=request_id)
        reply = call(self._address, self._stub.GetTimeline, message, timeout_s)
        return timeline_from_wire(reply.timeline)

    def timelines(
        self, window_s: float = 0.0, *, timeout_s: float = LIST_TIMEOUT_S
    ) -> list[Timeline]:
        """Those of requests that ended within the last `window_s`; 0 for all remembered."""
        request = pb.ListTimelinesRequest(window_s=window_s)
        messages = call_stream(self._address, self._stub.ListTimelines, request, timeout_s)
        return [timeline_from_wire(message) for message in messages]

    def steps(
        self, window_s: float, *, timeout_s: float = LIST_TIMEOUT_S
    ) -> dict[WorkerName, tuple[StepFacts, ...]]:
        """What each decode worker's engine did in the last `window_s`, on the router's clock.

        The last 8,192 steps of each worker are remembered.
        """
        request = pb.ListWorkerStepsRequest(window_s=window_s)
        messages = call_stream(self._address, self._stub.ListWorkerSteps, request, timeout_s)
        return {
            WorkerName(told.worker): tuple(map(step_from_wire, told.steps)) for told in messages
        }

    def reconfigure(self, router: RouterConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        """Have the router take from this section what it reads anew for each request.

        Raises:
            InvalidRequest: a setting is out of its range; none has changed.
        """
        message = pb.ReconfigureRequest(policy=policy_to_wire(router))
        call(self._address, self._stub.Reconfigure, message, timeout_s)


class AsyncAdmin:
    """As Admin, for asyncio."""

    def __init__(self, stub: Any, address: str) -> None:  # Any: as in Admin
        self._stub = stub
        self._address = address

    async def workers(self, *, timeout_s: float = TIMEOUT_S) -> list[ListedWorker]:
        """The connected workers as placement sees them."""
        reply = await call_async(
            self._address, self._stub.ListWorkers, pb.ListWorkersRequest(), timeout_s
        )
        return [listed_worker_from_wire(worker) for worker in reply.workers]

    async def requests(self, *, timeout_s: float = TIMEOUT_S) -> list[ListedRequest]:
        """The requests that are inside, oldest first."""
        reply = await call_async(
            self._address, self._stub.ListRequests, pb.ListRequestsRequest(), timeout_s
        )
        return [listed_request_from_wire(request) for request in reply.requests]

    async def drain(self, name: str, *, timeout_s: float = TIMEOUT_S) -> int:
        """Have a worker be given nothing new; returns how many requests it still serves.

        Raises:
            InvalidRequest: no worker of that name is connected.
        """
        reply = await call_async(
            self._address, self._stub.Drain, pb.DrainRequest(name=name), timeout_s
        )
        return int(reply.num_requests)

    async def explain(self, request_id: str, *, timeout_s: float = TIMEOUT_S) -> Explained:
        """As Admin.explain."""
        message = pb.ExplainRequest(request_id=request_id)
        return _explained(await call_async(self._address, self._stub.Explain, message, timeout_s))

    async def diagnose(self, window_s: float = 0.0, *, timeout_s: float = TIMEOUT_S) -> Diagnosis:
        """As Admin.diagnose."""
        message = pb.DiagnoseRequest(window_s=window_s)
        reply = await call_async(self._address, self._stub.Diagnose, message, timeout_s)
        return diagnosis_from_wire(reply)

    async def timeline(self, request_id: str, *, timeout_s: float = TIMEOUT_S) -> Timeline:
        """As Admin.timeline."""
        message = pb.GetTimelineRequest(request_id=request_id)
        reply = await call_async(self._address, self._stub.GetTimeline, message, timeout_s)
        return timeline_from_wire(reply.timeline)


def _explained(message: pb.ExplainResponse) -> Explained:
    return Explained(
        completion_from_wire(message.completion),
        message.age_s,
        tuple(map(finding_from_wire, message.findings)),
    )
