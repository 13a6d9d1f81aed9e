"""gRPC in, core types out: Generate, GetModel, and what operators ask.

`Generate` is a request's way through the front door: check, tokenize, admit, dispatch, and text
for each batch of tokens as it comes; whatever goes wrong leaves as one gRPC status with the whole
error in its trailer. When the client goes away the handler is cancelled, and dispatch frees what
the request held.

Runs in the router's event loop; only tokenization of a prompt runs in a thread.
"""

import asyncio
import logging
from dataclasses import dataclass

from core.clock import Clock
from core.completion import Chunk, Completion
from core.errors import InvalidRequest, PeerLost, TransferFailed, TwophaseError
from core.request import PROBE_ID, Request
from core.worker import BlockHolder, Role
from router.admission import Admission
from router.config import FrontDoorConfig
from router.detokenizer import Detokenizer
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.readiness import Readiness
from router.request import (
    Asked,
    Limits,
    Prompt,
    check_model,
    request_id_of,
    sampling_of,
    token_ids_of,
)
from router.tokenizer import Tokenizer
from router.totals import KvCounters
from twophase.server import Context, abort
from twophase.status_wire import holder_to_wire, kv_totals_to_wire, status_to_wire
from twophase.v1 import admin_pb2, admin_pb2_grpc
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chat_messages_from_wire, chunk_to_wire

STATUS_TIMEOUT_S = 2.0
# Below the clients' own limit, so that they hear why.
ADD_WORKER_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What both services share: who is inside, is the cluster ready, where KV caches came from."""

    admission: Admission
    readiness: Readiness
    counters: KvCounters


class InferenceService(pb_grpc.InferenceServicer):
    """What users call."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        door: FrontDoor,
        *,
        config: FrontDoorConfig,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._admission = door.admission
        self._readiness, self._counters = door.readiness, door.counters
        self._config = config
        self._clock = clock
        self._log = logging.getLogger("twophase.router")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        received_s = self._clock.now_s()
        deadline_s = received_s + self._time_limit_s(context)
        try:
            request_id = request_id_of(request.request_id)
            with self._admission.admitted(request_id):
                limits = self._limits()
                check_model(request.model, limits)
                prompt = _prompt(request)
                token_ids = await asyncio.to_thread(token_ids_of, prompt, self._tokenizer, limits)
                sampling = sampling_of(
                    _asked(request.sampling), len(token_ids), self._tokenizer.eos_token_ids, limits
                )
                completion = await self._stream(
                    Request(request_id, token_ids, sampling, deadline_s), received_s, context
                )
            self._counters.finished(completion)
            self._log_completion(completion)
        except TwophaseError as error:
            if isinstance(error, TransferFailed):
                self._counters.handoff_failed()
                self._readiness.doubt()
            self._log.info("request %s: %s", request.request_id or "(no id)", error)
            await abort(context, error)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        try:
            limits = self._limits()
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.GetModelResponse(
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            mode=self._config.mode,
        )

    async def _stream(self, request: Request, received_s: float, context: Context) -> Completion:
        detokenizer = Detokenizer(self._tokenizer)

        async def deliver(token_ids: list[int]) -> None:
            chunk = Chunk(detokenizer.push(token_ids), tuple(token_ids))
            await context.write(chunk_to_wire(chunk))

        completion = await self._dispatcher.run(
            request,
            received_s=received_s,
            tokenize_s=self._clock.now_s() - received_s,
            deliver=deliver,
        )
        await context.write(chunk_to_wire(Chunk(detokenizer.finish(), (), completion)))
        return completion

    def _limits(self) -> Limits:
        if not self._fleet.members(Role.DECODE):
            raise PeerLost("cluster", "no decode worker is connected")
        # Any of them may serve the next request, so the smallest limit holds.
        members = self._fleet.members(Role.DECODE) + self._fleet.members(Role.PREFILL)
        return Limits(
            model=self._config.model,
            vocab_size=min(member.info.vocab_size for member in members),
            max_context_tokens=min(member.info.max_context_tokens for member in members),
        )

    def _time_limit_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()
        most_s = self._config.router.default_deadline_s
        return most_s if remaining_s is None else min(remaining_s, most_s)

    def _log_completion(self, completion: Completion) -> None:
        usage, phases = completion.usage, completion.phases
        self._log.info(
            "request %s: %s, %d prompt and %d output tokens, first token %.3f s, total %.3f s, "
            "%s to %s",
            completion.request_id,
            completion.finish_reason,
            usage.num_prompt_tokens,
            usage.num_output_tokens,
            phases.time_to_first_token_s,
            phases.total_s,
            completion.prefill_worker,
            completion.decode_worker,
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
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
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
        is_known = self._admission.is_active(holder.request_id)
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


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "messages":
            return chat_messages_from_wire(request.messages)
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.ids)
    raise InvalidRequest("input", "unset", "must be prompt, messages or prompt_token_ids")


def _asked(sampling: pb.SamplingParams) -> Asked:
    return Asked(
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )
