"""The official instant double: a prefill and a decode worker that compute nothing.

They speak the workers' own protocol over real gRPC: a reservation is granted and a prefill answered
at once, and each step, one message, brings a token of every running request. Steps come at a
steady rate; one that is late is not made up for, as on a device.

Runs in one event loop. `emitted_s` tells when each token was handed to the transport.
"""

import asyncio
import os
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from core.layout import Dtype, KVLayout
from core.request import FinishReason, Request, RequestId, WorkerName
from core.timeline import DecodeReport, PrefillReport, TransferReport
from core.worker import (
    DecodeDone,
    DecodeUpdate,
    FirstToken,
    NewToken,
    PrefillEvent,
    RemoteReservation,
    Reserve,
    Reserved,
    Role,
    WorkerInfo,
    WorkerStatus,
)
from twophase import info_wire, status_wire, worker_wire
from twophase.server import Context
from twophase.v1 import worker_pb2 as pb
from twophase.v1 import worker_pb2_grpc as pb_grpc

BLOCK_SIZE = 16
LAYOUT = KVLayout("none", Dtype.FLOAT32, BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1)
NUM_BLOCKS = 1 << 20
MAX_CONTEXT_TOKENS = 8192


@dataclass(slots=True)
class _Sequence:
    """One running request; `index` is that of its next token."""

    request: Request
    outbox: "asyncio.Queue[DecodeUpdate]"
    index: int = 1


class Steps:
    """The decode worker's state: who runs, and when the next step is.

    Invariant: each token of a request is emitted once, in order, and the last one ends it.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self.step_s = 0.01
        self.num_steps = 0
        self.emitted_s: dict[RequestId, list[float]] = defaultdict(list)
        self._token_ids = token_ids
        self._waiting: dict[RequestId, _Sequence] = {}
        self._running: dict[RequestId, _Sequence] = {}
        self._work = asyncio.Event()

    def token_id(self, index: int) -> int:
        """The index-th token of any answer."""
        return self._token_ids[index % len(self._token_ids)]

    def reserve(self, request: Request, outbox: "asyncio.Queue[DecodeUpdate]") -> None:
        """Let a request wait for its prompt."""
        self._waiting[request.request_id] = _Sequence(request, outbox)

    def begin(self, request_id: RequestId) -> None:
        """The prompt is there: the request takes part in steps."""
        self.emitted_s[request_id].append(time.monotonic())
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None and sequence.request.sampling.max_tokens > 1:
            self._running[request_id] = sequence
            self._work.set()

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request; idempotent."""
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    async def run(self) -> None:
        """Step while there is work; never returns."""
        next_s = time.monotonic()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            next_s = max(next_s + self.step_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            self._step()

    def _step(self) -> None:
        self.num_steps += 1
        updates: dict[int, tuple[asyncio.Queue[DecodeUpdate], list[NewToken]]] = {}
        now_s = time.monotonic()
        for sequence in list(self._running.values()):
            token = self._next_token(sequence)
            self.emitted_s[sequence.request.request_id].append(now_s)
            updates.setdefault(id(sequence.outbox), (sequence.outbox, []))[1].append(token)
        for outbox, tokens in updates.values():
            outbox.put_nowait(DecodeUpdate(tokens=tuple(tokens)))

    def _next_token(self, sequence: _Sequence) -> NewToken:
        request, index = sequence.request, sequence.index
        sequence.index += 1
        done = None
        if sequence.index >= request.sampling.max_tokens:
            done = DecodeDone(FinishReason.LENGTH, DecodeReport(0.0, index * self.step_s))
            del self._running[request.request_id]
        return NewToken(request.request_id, self.token_id(index), index, done)


class _Worker(pb_grpc.WorkerServicer):
    def __init__(self, role: Role, model: str, vocab_size: int, steps: Steps) -> None:
        self.address = ""
        self.steps = steps
        self.info = WorkerInfo(
            name=WorkerName(f"instant-{role.value}"),
            role=role,
            incarnation=uuid.uuid4().hex,
            model=model,
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            vocab_size=vocab_size,
            max_num_sequences=1 << 16,
            kernels="none: a double",
        )

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.WorkerInfo:
        return info_wire.info_to_wire(self.info)

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: Context
    ) -> pb.WorkerStatus:
        status = WorkerStatus(
            name=self.info.name,
            role=self.info.role,
            address=self.address,
            pid=os.getpid(),
            num_total_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS,
            num_cached_blocks=0,
            num_used_blocks=0,
            num_quarantined_blocks=0,
            num_waiting_requests=0,
            num_running_requests=0,
            num_reservations=0,
            num_open_transfers=0,
            num_handler_tasks=0,
            num_steps=self.steps.num_steps,
            num_transfer_bytes=0,
            num_waiting_prompt_tokens=0,
        )
        return status_wire.status_to_wire(status)


class InstantPrefill(_Worker, pb_grpc.PrefillWorkerServicer):
    """Answers a prompt at once."""

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> None:
        prompt = worker_wire.request_from_wire(request.request, 0.0)
        report = PrefillReport(0.0, 0.0, 0, 1)
        events: tuple[PrefillEvent, ...] = (
            FirstToken(self.steps.token_id(0), report),
            TransferReport("none", 0, 0, 0.0, 0.0),
        )
        self.steps.begin(prompt.request_id)
        for event in events:
            await context.write(worker_wire.prefill_event_to_wire(event))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve at `server`."""
        pb_grpc.add_WorkerServicer_to_server(self, server)
        pb_grpc.add_PrefillWorkerServicer_to_server(self, server)


class InstantDecode(_Worker, pb_grpc.DecodeWorkerServicer):
    """Grants every reservation, and steps."""

    async def Session(
        self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Context
    ) -> None:
        outbox: asyncio.Queue[DecodeUpdate] = asyncio.Queue()

        async def read() -> None:
            async for message in request_iterator:
                command = worker_wire.command_from_wire(message, time.monotonic())
                if isinstance(command, Reserve):
                    self.steps.reserve(command.request, outbox)
                    outbox.put_nowait(DecodeUpdate(reserved=(self._granted(command.request),)))
                else:
                    self.steps.cancel(command.request_id)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                await context.write(worker_wire.update_to_wire(await outbox.get()))

    def _granted(self, request: Request) -> Reserved:
        num_blocks = -(-request.num_prompt_tokens // BLOCK_SIZE)
        reservation = RemoteReservation(
            decode_worker=self.info.name,
            decode_address=self.address,
            decode_incarnation=self.info.incarnation,
            epoch=1,
            block_ids=tuple(range(num_blocks)),
            num_shared_blocks=0,
            num_shared_tokens=0,
            prompt_digest=request.prompt_digest,
        )
        return Reserved(request.request_id, reservation)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve at `server`."""
        pb_grpc.add_WorkerServicer_to_server(self, server)
        pb_grpc.add_DecodeWorkerServicer_to_server(self, server)
