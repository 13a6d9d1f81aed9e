"""gRPC in, core types out: the prefill worker's server and the loop that feeds its device.

The life of a prompt through this module is `PrefillService._prefill`, a few lines: wait and
compute (`worker`), push what is computed (`kv_link`), tell the router the first token and the end.
Cancelling the call, or any failure, leaves through the same `finally`: the handoff is closed
first, so that nobody reads the blocks any more, then the blocks go back.

Everything here runs in one event loop; only steps run in the device's thread.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from core.clock import Clock
from core.errors import (
    InvariantBroken,
    PeerLost,
    PeerStopping,
    TwophaseError,
)
from core.request import Request, RequestId, log_name
from core.worker import (
    FirstToken,
    PrefillEvent,
    PromptLogprobs,
    RemoteReservation,
    Role,
    WorkerInfo,
    WorkerStatus,
)
from engine.failed_steps import FailedSteps
from engine.runner import Runner
from kv_link.link import Handoff
from kv_link.link_pool import LinkPool
from prefill_worker.worker import Computed, PrefillWorker
from twophase import info_wire, status_wire, worker_wire
from twophase.server import Context, abort
from twophase.v1 import worker_pb2 as pb
from twophase.v1 import worker_pb2_grpc as pb_grpc


class PrefillService(pb_grpc.WorkerServicer, pb_grpc.PrefillWorkerServicer):
    """One prefill worker behind gRPC."""

    def __init__(
        self,
        info: WorkerInfo,
        worker: PrefillWorker,
        runner: Runner,
        links: LinkPool,
        *,
        device: ThreadPoolExecutor,
        clock: Clock,
    ) -> None:
        self.address = ""
        self._info = info
        self._worker = worker
        self._runner = runner
        self._links = links
        self._device = device
        self._clock = clock
        self._work = asyncio.Event()
        self._is_draining = False
        self._is_drained = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._handoffs: dict[RequestId, Handoff] = {}
        self._progress: dict[RequestId, asyncio.Queue[Computed | TwophaseError]] = {}
        self._log = logging.getLogger("twophase.prefill_worker")

    async def run_device(self) -> None:
        """Run steps while there is work; never returns, raises DeviceLost when all of them fail."""
        loop, failed = self._loop, FailedSteps()
        while True:
            steps = self._worker.next_steps()
            if not steps:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                result = await loop.run_in_executor(
                    self._device, self._runner.step, steps, self._on_layer
                )
            except (InvariantBroken, PeerLost):  # a bug, or one of the ranks is gone
                raise
            except Exception as error:  # root of the device loop: the batch fails, not the worker
                self._log.exception("a step failed")
                for request_id in self._worker.step_failed():
                    self._tell(request_id, TwophaseError(f"the prefill step failed: {error}"))
                failed.failed(error, self._clock.now_s())
                continue
            failed.succeeded()
            for computed in self._worker.apply(result, self._clock.now_s()):
                self._tell(computed.request_id, computed.error or computed)

    async def drain(self, limit_s: float) -> None:
        """Take nothing new; return when every KV cache is sealed at decode, or after `limit_s`."""
        self._is_draining = True
        self._note_drained()
        try:
            async with asyncio.timeout(limit_s):
                await self._is_drained.wait()
        except TimeoutError:
            self._log.warning("%d prompts were not done in time", len(self._progress))

    def _note_drained(self) -> None:
        if self._is_draining and not self._progress:
            self._is_drained.set()

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> None:
        try:
            core_request = worker_wire.request_from_wire(request.request, self._clock.now_s())
            reservation = worker_wire.reservation_from_wire(request.reservation)
            async with aclosing(self._prefill(core_request, reservation)) as events:
                async for event in events:
                    await context.write(worker_wire.prefill_event_to_wire(event))
        except TwophaseError as error:
            name = log_name(request.request.request_id, request.request.trace_id)
            self._log.info("request %s: %s", name, error)
            await abort(context, error)

    async def _prefill(
        self, request: Request, reservation: RemoteReservation
    ) -> AsyncGenerator[PrefillEvent, None]:
        if self._is_draining:
            raise PeerStopping(self._info.name)
        self._worker.add(request, self._clock.now_s())
        progress = self._progress[request.request_id] = asyncio.Queue()
        self._work.set()
        handoff = None
        try:
            handoff = await self._links.begin(request, reservation)
            self._handoffs[request.request_id] = handoff
            handoff.on_failure(progress.put_nowait)
            is_prompt_done = False
            while not is_prompt_done:
                computed = await progress.get()
                if isinstance(computed, TwophaseError):
                    raise computed
                first = computed.first_token
                first_token_id = None if first is None else first.token_id
                handoff.computed(computed.num_tokens, computed.block_ids, first_token_id)
                if computed.prompt_logprobs:
                    yield PromptLogprobs(request.request_id, computed.prompt_logprobs)
                if first is not None and computed.report is not None:
                    yield FirstToken(first.token_id, computed.report, first.logprobs)
                    is_prompt_done = True
            report = await handoff.sealed()
            self._log.info(
                "request %s: %d prompt tokens read, %d bytes of KV sealed at %s",
                request.log_name,
                request.num_prompt_tokens,
                report.num_bytes,
                reservation.decode_worker,
            )
            self._worker.meter.sealed(report.exposed_s, self._clock.now_s())
            yield report
        finally:
            del self._progress[request.request_id]
            self._handoffs.pop(request.request_id, None)
            try:
                if handoff is not None:
                    await handoff.close()
            finally:
                self._worker.release(request.request_id)
                self._work.set()
                self._note_drained()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.WorkerInfo:
        return info_wire.info_to_wire(self._info, self._clock.now_s())

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: Context
    ) -> pb.WorkerStatus:
        return status_wire.status_to_wire(self.status(), self._clock.now_s())

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: Context
    ) -> pb.ListBlocksResponse:
        holders = self._worker.holders(self._info.name, self._clock.now_s())
        return pb.ListBlocksResponse(holders=map(status_wire.holder_to_wire, holders))

    def status(self) -> WorkerStatus:
        """What the worker holds."""
        blocks, now_s = self._worker.pool.counts(), self._clock.now_s()
        return WorkerStatus(
            name=self._info.name,
            role=Role.PREFILL,
            address=self.address,
            pid=os.getpid(),
            num_total_blocks=blocks.total,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_used_blocks=blocks.used,
            num_quarantined_blocks=blocks.quarantined,
            num_waiting_requests=self._worker.num_waiting,
            num_running_requests=self._worker.num_running,
            num_reservations=self._worker.num_running,
            num_open_transfers=self._links.num_open_transfers,
            num_handler_tasks=len(self._progress),
            num_steps=self._worker.num_steps,
            num_transfer_bytes=self._links.num_bytes,
            num_waiting_prompt_tokens=self._worker.num_waiting_tokens,
            kernels=self._info.kernels,
            links=self._links.statuses,
            num_runnable_requests=self._worker.num_runnable,
            is_draining=self._is_draining,
            signals=self._worker.meter.signals(
                now_s,
                oldest_wait_s=self._worker.oldest_wait_s(now_s),
                num_parked=self._worker.num_parked,
                links=self._links.loads(now_s),
            ),
            samples=tuple(
                sample
                for tally in (self._worker.tally, self._links.tally)
                for sample in tally.samples(self._info.name)
            ),
        )

    def _on_layer(self, layer: int) -> None:
        """Called in a thread of the device once a layer's KV is written."""
        self._loop.call_soon_threadsafe(self._layer_computed, layer + 1)

    def _layer_computed(self, num_layers: int) -> None:
        for computed in self._worker.layer_computed(num_layers):
            handoff = self._handoffs.get(computed.request_id)
            if handoff is not None:
                handoff.layers_computed(
                    computed.num_tokens, computed.num_layers, computed.block_ids
                )

    def _tell(self, request_id: RequestId, progress: Computed | TwophaseError) -> None:
        queue = self._progress.get(request_id)
        if queue is not None:
            queue.put_nowait(progress)
