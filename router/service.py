"""gRPC in, core types out: Generate, GetModel, and what operators ask.

A request's own way is in `generation`; here its message is unpacked, each delivery is written as
one message, and whatever goes wrong leaves as one gRPC status with the whole error in its trailer.
When the client goes away the handler is cancelled.

Runs in the router's event loop.
"""

from core.clock import Clock
from core.completion import Chunk
from core.errors import InvalidRequest, PeerLost, TwophaseError
from core.request import PROBE_ID, id_of_attempt
from core.worker import BlockHolder
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.generation import Delivery, FrontDoor, Generation, Incoming
from router.request import Prompt, request_id_of
from twophase.server import Context, abort
from twophase.status_wire import (
    holder_to_wire,
    kv_totals_to_wire,
    status_to_wire,
    stuck_to_wire,
)
from twophase.v1 import admin_pb2, admin_pb2_grpc
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chat_messages_from_wire, chunk_to_wire, sampling_from_wire

STATUS_TIMEOUT_S = 2.0
# Below the clients' own limit, so that they hear why.
ADD_WORKER_TIMEOUT_S = 20.0


class InferenceService(pb_grpc.InferenceServicer):
    """What users call."""

    def __init__(self, generation: Generation, *, config: FrontDoorConfig, clock: Clock) -> None:
        self._generation = generation
        self._config = config
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        received_s = self._clock.now_s()

        async def deliver(delivery: Delivery) -> None:
            await context.write(chunk_to_wire(_joined(delivery)))

        try:
            incoming = Incoming(
                request_id=request_id_of(request.request_id),
                model=request.model,
                prompt=_prompt(request),
                asked=sampling_from_wire(request.sampling),
                received_s=received_s,
                time_limit_s=context.time_remaining(),
            )
            await self._generation.run(incoming, deliver)
        except TwophaseError as error:
            await abort(context, error)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        try:
            limits = self._generation.limits()
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.GetModelResponse(
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            mode=self._config.mode,
        )


class AdminService(admin_pb2_grpc.AdminServicer):
    """What operators and the deployment call."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        door: FrontDoor,
        *,
        config: FrontDoorConfig,
        http_address: str,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._http_address = http_address
        self._readiness, self._counters = door.readiness, door.counters
        self._admission = door.admission
        self._config = config

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        statuses, silent = await self._fleet.statuses(STATUS_TIMEOUT_S)
        return admin_pb2.GetStatusResponse(
            mode=self._config.mode,
            model=self._config.model,
            is_ready=self._readiness.is_ready,
            num_active_requests=self._admission.num_active_requests,
            workers=[status_to_wire(status) for status in statuses],
            num_prefill_calls=self._dispatcher.num_prefill_calls,
            num_mailboxes=self._fleet.num_mailboxes,
            kv=kv_totals_to_wire(self._counters.totals),
            silent_workers=silent,
            http_address=self._http_address,
            stuck_workers=map(stuck_to_wire, self._fleet.stuck),
        )

    async def AuditBlocks(
        self, request: admin_pb2.AuditBlocksRequest, context: Context
    ) -> admin_pb2.AuditBlocksResponse:
        return admin_pb2.AuditBlocksResponse(
            holders=[
                admin_pb2.AuditedHolder(
                    holder=holder_to_wire(holder),
                    is_orphan=self._is_orphan(holder),
                )
                for holder in await self._fleet.holders(STATUS_TIMEOUT_S)
            ]
        )

    def _is_orphan(self, holder: BlockHolder) -> bool:
        """Whether blocks are held for nobody; quarantine outlives its request by design."""
        is_known = self._admission.is_active(id_of_attempt(holder.request_id))
        is_probe = holder.request_id.startswith(PROBE_ID)
        return not is_known and not is_probe and holder.state != "quarantined"

    async def AddWorker(
        self, request: admin_pb2.AddWorkerRequest, context: Context
    ) -> admin_pb2.AddWorkerResponse:
        try:
            if ":" not in request.address:
                raise InvalidRequest("address", request.address, "must be host:port")
            is_new = self._fleet.add(request.address)
            info = await self._fleet.wait_for(request.address, ADD_WORKER_TIMEOUT_S)
        except PeerLost as error:
            if is_new:
                await self._fleet.remove(request.address)
            await abort(context, error)
            raise
        except TwophaseError as error:
            await abort(context, error)
            raise
        return admin_pb2.AddWorkerResponse(name=info.name)

    async def RemoveWorker(
        self, request: admin_pb2.RemoveWorkerRequest, context: Context
    ) -> admin_pb2.RemoveWorkerResponse:
        await self._fleet.remove(request.address)
        return admin_pb2.RemoveWorkerResponse()


def _joined(delivery: Delivery) -> Chunk:
    """All chunks of a delivery as one message."""
    chunks = delivery.chunks
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        chunks[-1].completion,
        tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "messages":
            return chat_messages_from_wire(request.messages)
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.ids)
    raise InvalidRequest("input", "unset", "must be prompt, messages or prompt_token_ids")
