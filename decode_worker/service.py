"""gRPC in, core types out: the decode worker's server and the loop that feeds its device.

Two kinds of streams meet here. A router's *session* brings commands and takes one message per
step with the new tokens of all its requests; its end gives up everything that it asked for. A
sender's *link* brings KV caches (`link`). Both only change the state in `worker`; after each
change `changed` sends what the sessions have to be told and wakes the device loop. When the worker
stops, `Migrate` ships running answers to others (`migration`).

Everything here runs in one event loop; only steps run in the device's thread.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager

from core.clock import Clock
from core.errors import InvariantBroken, PeerLost, TwophaseError
from core.request import RequestId, log_name
from core.worker import (
    CancelRequest,
    DecodeUpdate,
    HoldRequest,
    Reserve,
    Role,
    WorkerStatus,
)
from decode_worker.link import LinkServer
from decode_worker.migration import Departure, Migrations
from decode_worker.worker import DecodeWorker
from engine.failed_steps import FailedSteps
from engine.runner import Runner
from twophase import event_wire, info_wire, link_wire, status_wire, worker_wire
from twophase.server import Context, abort, readable, run_stream
from twophase.v1 import worker_pb2 as pb
from twophase.v1 import worker_pb2_grpc as pb_grpc

TICK_S = 0.25


class DecodeService(pb_grpc.WorkerServicer, pb_grpc.DecodeWorkerServicer):
    """One decode worker behind gRPC."""

    def __init__(
        self,
        worker: DecodeWorker,
        runner: Runner,
        links: LinkServer,
        migrations: Migrations,
        *,
        device: ThreadPoolExecutor,
        clock: Clock,
    ) -> None:
        self._worker = worker
        self._runner = runner
        self._links = links
        self._migrations = migrations
        self._device = device
        self._clock = clock
        self._work = asyncio.Event()
        self._is_drained = asyncio.Event()
        self._is_ending = asyncio.Event()
        self._sessions: dict[str, asyncio.Queue[DecodeUpdate]] = {}
        self._log = logging.getLogger("twophase.decode_worker")
        links.changed = migrations.changed = self.changed

    async def run_device(self) -> None:
        """Run steps while there is work; never returns, raises DeviceLost when all of them fail."""
        loop, failed = asyncio.get_running_loop(), FailedSteps()
        while True:
            steps = self._worker.next_steps(self._clock.now_s())
            if not steps:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                result = await loop.run_in_executor(self._device, self._runner.step, steps)
            except (InvariantBroken, PeerLost):  # a bug, or one of the ranks is gone
                raise
            except Exception as error:  # root of the device loop: the batch fails, not the worker
                self._log.exception("a step failed")
                failure = TwophaseError(f"the decode step failed: {error}")
                self._worker.step_failed(failure, self._clock.now_s())
                failed.failed(error, self._clock.now_s())
            else:
                failed.succeeded()
                self._worker.apply(result, self._clock.now_s())
            self.changed()

    async def drain(self, limit_s: float) -> None:
        """Take nothing new and end what is here, then every stream.

        Routers are told at once and take requests away that others can go on with; the rest has
        `limit_s` to finish, then it is handed back.
        """
        self._worker.is_draining = True
        for outbox in self._sessions.values():
            outbox.put_nowait(DecodeUpdate(is_draining=True))
        self.changed()
        try:
            async with asyncio.timeout(limit_s):
                await self._is_drained.wait()
        except TimeoutError:
            self._log.warning("%d requests were not done in time", self._worker.census.num_known)
        self._worker.hand_back(self._clock.now_s())
        self.changed()
        self._is_ending.set()

    async def run_ticks(self) -> None:
        """Let deadlines and leases pass; never returns."""
        while True:
            await asyncio.sleep(TICK_S)
            self._worker.tick(self._clock.now_s())
            self.changed()

    def changed(self) -> None:
        """Tell the sessions what happened and wake the device loop."""
        for session_id, update in self._worker.take_updates().items():
            outbox = self._sessions.get(session_id)
            if outbox is not None:
                outbox.put_nowait(update)
        self._work.set()
        if self._worker.is_draining and self._worker.census.num_known == 0:
            self._is_drained.set()

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: Context,
    ) -> None:
        with self._session() as (session_id, outbox):
            if self._worker.is_draining:
                outbox.put_nowait(DecodeUpdate(is_draining=True))
            await run_stream(
                context,
                self._read(session_id, request_iterator),
                _write_updates(outbox, context),
                self._until_told(outbox),
            )

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> None:
        try:
            departure = Departure(
                RequestId(request.held_id),
                worker_wire.request_from_wire(request.request, self._clock.now_s()),
                worker_wire.reservation_from_wire(request.reservation),
            )
            with self._session() as (session_id, outbox):
                shipping = self._migrations.ship(session_id, outbox, departure)
                async with aclosing(shipping) as events:
                    async for event in events:
                        await context.write(worker_wire.prefill_event_to_wire(event))
        except TwophaseError as error:
            self._log.info("request %s was not moved: %s", request.held_id, error)
            await abort(context, error)

    @contextmanager
    def _session(self) -> Iterator[tuple[str, asyncio.Queue[DecodeUpdate]]]:
        """Yield who asks and what it is to be told; its end gives up all that it asked for."""
        session_id = uuid.uuid4().hex
        outbox = self._sessions[session_id] = asyncio.Queue()
        try:
            yield session_id, outbox
        finally:
            del self._sessions[session_id]
            self._worker.lose_session(session_id, self._clock.now_s())
            self.changed()

    async def _read(self, session_id: str, messages: AsyncIterator[pb.DecodeCommand]) -> None:
        async for message in readable(messages, lambda message: message):
            self._command(session_id, message)

    async def _until_told(self, outbox: asyncio.Queue[DecodeUpdate]) -> None:
        """Return when the worker is ending and the router was told everything."""
        await self._is_ending.wait()
        await outbox.join()

    def _command(self, session_id: str, message: pb.DecodeCommand) -> None:
        now_s = self._clock.now_s()
        try:
            command = worker_wire.command_from_wire(message, now_s)
        except TwophaseError as error:
            refused = message.reserve.request
            name = log_name(refused.request_id, refused.trace_id)
            self._log.info("request %s: %s", name, error)
            self._worker.refuse(session_id, RequestId(refused.request_id), error)
            self.changed()
            return
        match command:
            case Reserve() as reserve:
                self._worker.reserve(session_id, reserve, now_s)
            case CancelRequest(request_id):
                self._worker.cancel(session_id, request_id, now_s)
            case HoldRequest(request_id):
                self._worker.hold(session_id, request_id, now_s)
        self.changed()

    async def Link(self, request_iterator: AsyncIterator[pb.LinkUp], context: Context) -> None:
        outbox: asyncio.Queue[pb.LinkDown] = asyncio.Queue()

        async def carry() -> None:
            await self._links.serve(
                readable(request_iterator, link_wire.up_from_wire),
                lambda message: outbox.put_nowait(link_wire.down_to_wire(message)),
            )
            await outbox.join()

        await run_stream(context, carry(), _write(outbox, context), self._until_ending())

    async def _until_ending(self) -> None:
        await self._is_ending.wait()

    async def ListSteps(
        self, request: pb.ListStepsRequest, context: Context
    ) -> pb.ListStepsResponse:
        steps = self._worker.steps.within(request.window_s, self._clock.now_s())
        return pb.ListStepsResponse(steps=map(event_wire.step_to_wire, steps))

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.WorkerInfo:
        return info_wire.info_to_wire(self._worker.info, self._clock.now_s())

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: Context
    ) -> pb.WorkerStatus:
        return status_wire.status_to_wire(self.status(), self._clock.now_s())

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: Context
    ) -> pb.ListBlocksResponse:
        holders = self._worker.holders(self._clock.now_s())
        return pb.ListBlocksResponse(holders=map(status_wire.holder_to_wire, holders))

    def status(self) -> WorkerStatus:
        """What the worker holds."""
        blocks, now_s = self._worker.pool.counts(), self._clock.now_s()
        counts, sent = self._worker.census, self._migrations.links
        holders = self._worker.holders(now_s)
        waits_s = [holder.age_s for holder in holders if holder.state == "waiting"]
        return WorkerStatus(
            name=self._worker.info.name,
            role=Role.DECODE,
            address=self._worker.address,
            pid=os.getpid(),
            num_total_blocks=blocks.total,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_used_blocks=blocks.used,
            num_quarantined_blocks=blocks.quarantined,
            num_waiting_requests=counts.num_waiting,
            num_running_requests=counts.num_running,
            num_reservations=counts.num_reservations,
            num_open_transfers=self._worker.handoffs.num_open + sent.num_open_transfers,
            num_handler_tasks=counts.num_known,
            num_steps=self._worker.num_steps,
            num_transfer_bytes=self._links.num_bytes,
            num_waiting_prompt_tokens=counts.num_waiting_tokens,
            kernels=self._worker.info.kernels,
            links=(*self._links.statuses, *sent.statuses),
            quarantine_age_s=self._worker.handoffs.quarantine_age_s(now_s),
            num_runnable_requests=counts.num_runnable,
            is_draining=self._worker.is_draining,
            signals=self._worker.meter.signals(now_s, oldest_wait_s=max(waits_s, default=0.0)),
            samples=tuple(
                sample
                for tally in (self._worker.recording.counts.tally, sent.tally)
                for sample in tally.samples(self._worker.info.name)
            ),
        )


async def _write_updates(outbox: asyncio.Queue[DecodeUpdate], context: Context) -> None:
    while True:
        await context.write(worker_wire.update_to_wire(await outbox.get()))
        outbox.task_done()


async def _write(outbox: asyncio.Queue[pb.LinkDown], context: Context) -> None:
    while True:
        await context.write(await outbox.get())
        outbox.task_done()
