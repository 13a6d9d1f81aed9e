"""gRPC in, core types out: what operators and the deployment ask of a router.

Runs in the router's event loop.
"""

import asyncio
import time
from dataclasses import replace

from core.clock import Clock
from core.completion import Completion
from core.diagnosis import spreads, troubles
from core.errors import InvalidRequest, PeerLost, TwophaseError
from core.events.event import Event
from core.events.timeline import Timeline
from core.request import PROBE_ID, RequestId, WorkerName, id_of_attempt
from core.worker import BlockHolder, Role
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.generation import FrontDoor
from router.listing import listed_request, listed_worker
from router.members.fleet import Fleet
from router.telemetry.history import Ended
from twophase.event_wire import step_to_wire
from twophase.listing_wire import listed_request_to_wire, listed_worker_to_wire
from twophase.policy_wire import policy_from_wire
from twophase.report_wire import finding_to_wire, spread_to_wire, trouble_to_wire
from twophase.server import Context, abort
from twophase.signals_wire import demand_to_wire
from twophase.status_wire import holder_to_wire, kv_totals_to_wire, status_to_wire, stuck_to_wire
from twophase.timeline_wire import timeline_to_wire
from twophase.v1 import admin_pb2 as pb
from twophase.v1 import admin_pb2_grpc as pb_grpc
from twophase.wire import completion_to_wire

STATUS_TIMEOUT_S = 2.0
# Below the clients' own limit, so that they hear why.
ADD_WORKER_TIMEOUT_S = 20.0


class AdminService(pb_grpc.AdminServicer):
    """What operators and the deployment call."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        door: FrontDoor,
        *,
        config: FrontDoorConfig,
        http_address: str,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._http_address = http_address
        self._door = door
        self._config = config
        self._clock = clock

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        statuses, silent = await self._fleet.statuses(STATUS_TIMEOUT_S)
        return pb.GetStatusResponse(
            mode=self._config.mode,
            model=self._config.model,
            is_ready=self._door.readiness.is_ready,
            num_active_requests=self._door.running.num_requests,
            workers=[status_to_wire(status) for status in statuses],
            num_prefill_calls=self._dispatcher.num_prefill_calls,
            num_mailboxes=self._fleet.num_mailboxes,
            kv=kv_totals_to_wire(self._door.counters.totals),
            silent_workers=silent,
            http_address=self._http_address,
            stuck_workers=map(stuck_to_wire, self._fleet.stuck),
            demand=demand_to_wire(self._dispatcher.demand),
        )

    async def AuditBlocks(
        self, request: pb.AuditBlocksRequest, context: Context
    ) -> pb.AuditBlocksResponse:
        return pb.AuditBlocksResponse(
            holders=[
                pb.AuditedHolder(
                    holder=holder_to_wire(holder),
                    is_orphan=self._is_orphan(holder),
                )
                for holder in await self._fleet.holders(STATUS_TIMEOUT_S)
            ]
        )

    def _is_orphan(self, holder: BlockHolder) -> bool:
        """Whether blocks are held for nobody; quarantine outlives its request by design."""
        is_known = self._door.running.is_inside(id_of_attempt(holder.request_id))
        is_probe = holder.request_id.startswith(PROBE_ID)
        return not is_known and not is_probe and holder.state != "quarantined"

    async def AddWorker(
        self, request: pb.AddWorkerRequest, context: Context
    ) -> pb.AddWorkerResponse:
        try:
            if ":" not in request.address:
                raise InvalidRequest("address", request.address, "must be host:port")
            is_new = self._fleet.add(request.address)
            info = await self._fleet.wait_for(request.address, ADD_WORKER_TIMEOUT_S)
        except (PeerLost, asyncio.CancelledError) as error:
            if is_new:  # nobody would know that it is still looked for
                await self._fleet.remove(request.address)
            if isinstance(error, PeerLost):
                await abort(context, error)
            raise
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.AddWorkerResponse(name=info.name)

    async def RemoveWorker(
        self, request: pb.RemoveWorkerRequest, context: Context
    ) -> pb.RemoveWorkerResponse:
        await self._fleet.remove(request.address)
        return pb.RemoveWorkerResponse()

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        now_s = self._clock.now_s()
        members = [member for role in Role for member in self._fleet.members(role)]
        listed = [listed_worker_to_wire(listed_worker(member, now_s)) for member in members]
        return pb.ListWorkersResponse(workers=listed)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        now_s = self._clock.now_s()
        running = self._door.running.oldest_first()
        listed = [listed_request_to_wire(listed_request(one, now_s)) for one in running]
        return pb.ListRequestsResponse(requests=listed)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        member = self._fleet.drain(WorkerName(request.name))
        if member is None:
            error = InvalidRequest("name", request.name, "no worker of that name is connected")
            await abort(context, error)
            raise error
        return pb.DrainResponse(num_requests=member.num_requests)

    async def NoteScaling(
        self, request: pb.NoteScalingRequest, context: Context
    ) -> pb.NoteScalingResponse:
        self._door.decisions.add(request.sentence, self._clock.now_s())
        return pb.NoteScalingResponse()

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        history = self._door.history
        ended = history.find(RequestId(request.request_id))
        if ended is None:
            what = "no request with this id ended lately"
            await abort(context, error := InvalidRequest("request_id", request.request_id, what))
            raise error
        return pb.ExplainResponse(
            completion=completion_to_wire(ended.completion),
            age_s=self._clock.now_s() - ended.ended_s,
            findings=map(finding_to_wire, history.explain(ended)),
        )

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:
        completions = self._door.history.since(request.window_s or float("inf"))
        return pb.DiagnoseResponse(
            num_requests=len(completions),
            troubles=map(trouble_to_wire, troubles(completions)),
            phases=map(spread_to_wire, spreads(completions)),
        )

    async def GetTimeline(
        self, request: pb.GetTimelineRequest, context: Context
    ) -> pb.GetTimelineResponse:
        timeline = self._timeline(RequestId(request.request_id))
        if timeline is None:
            what = "no request with this id was placed or ended lately"
            await abort(context, error := InvalidRequest("request_id", request.request_id, what))
            raise error
        return pb.GetTimelineResponse(timeline=timeline_to_wire(timeline))

    async def ListTimelines(self, request: pb.ListTimelinesRequest, context: Context) -> None:
        for ended in self._door.history.ended_within(request.window_s or float("inf")):
            await context.write(timeline_to_wire(self._ended_timeline(ended)))

    async def ListWorkerSteps(self, request: pb.ListWorkerStepsRequest, context: Context) -> None:
        members = self._fleet.members(Role.DECODE)
        asked = [member.peer.steps(request.window_s, STATUS_TIMEOUT_S) for member in members]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for member, steps in zip(members, answers, strict=True):
            if not isinstance(steps, BaseException):
                told = map(step_to_wire, steps)
                await context.write(pb.WorkerSteps(worker=member.info.name, steps=told))

    def _timeline(self, request_id: RequestId) -> Timeline | None:
        running = self._door.running.find(request_id)
        if running is not None and running.answer is not None:
            completion = running.answer.known(self._clock.now_s())
            return self._told(completion, running.answer.record.events(None), is_running=True)
        ended = self._door.history.find(request_id)
        return None if ended is None else self._ended_timeline(ended)

    def _ended_timeline(self, ended: Ended) -> Timeline:
        completion = ended.completion
        return self._told(
            completion, ended.record.events(completion.phases.total_s), is_running=False
        )

    def _told(
        self, completion: Completion, events: tuple[Event, ...], *, is_running: bool
    ) -> Timeline:
        places = {event.where for event in events}
        members = [member for role in Role for member in self._fleet.members(role)]
        return Timeline(
            completion,
            events,
            is_running=is_running,
            now_s=self._clock.now_s(),
            now_wall_s=time.time(),
            clocks=tuple(m.peer.worker_clock for m in members if m.info.name in places),
        )

    async def Reconfigure(
        self, request: pb.ReconfigureRequest, context: Context
    ) -> pb.ReconfigureResponse:
        try:
            router = policy_from_wire(request.policy, self._config.router)
        except InvalidRequest as error:
            await abort(context, error)
            raise
        self._config = replace(self._config, router=router)
        self._dispatcher.obey(self._config.dispatch)
        return pb.ReconfigureResponse()
