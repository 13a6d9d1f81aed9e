"""Calls from router to workers and from worker to worker, in core types.

Every failed call raises one error of the core tree; a broken stream is PeerLost. One Peer is one
connection, used from one event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc

from core.clock import Clock
from core.errors import Cancelled, PeerLost, TwophaseError, Unauthenticated
from core.events.clock_offset import ClockOffset, WorkerClock
from core.events.step import StepFacts
from core.link import LinkDown, LinkUp
from core.request import Request, RequestId, WorkerName
from core.worker import (
    BlockHolder,
    DecodeCommand,
    DecodeUpdate,
    PrefillEvent,
    RemoteReservation,
    WorkerInfo,
    WorkerStatus,
)
from twophase import event_wire, info_wire, link_wire, status_wire, worker_wire
from twophase.credentials import Credentials
from twophase.errors import from_rpc_error
from twophase.v1 import worker_pb2 as pb
from twophase.v1 import worker_pb2_grpc as pb_grpc

MAX_MESSAGE_BYTES = 16 << 20

# A peer that is stopped, or a cable that is cut, shows only through unanswered pings.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
# One server waits for another that starts: it is there within a second after it listens.
PEER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A caller whose machine is gone shows only so, and holds what it asked for until then.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    # Admission refuses what is too much; gRPC's own early rejection looks like a cancel.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)

Sent = TypeVar("Sent")
Received = TypeVar("Received")


@contextmanager
def _core_errors(peer: str) -> Any:  # Any: a context manager that yields nothing
    try:
        yield
    except grpc.RpcError as error:
        # Kept in no variable of this frame: an error whose traceback leads to itself keeps the
        # call, and with it the connection, until the next garbage collection.
        raise _failure_of(error, peer) from error
    except (ValueError, KeyError) as error:
        # Another version's words: the peer cannot be understood, which is no fault of ours.
        raise PeerLost(peer, f"it sent an unreadable message ({error})") from error
    except asyncio.CancelledError as error:
        # A channel that is closed cancels its calls, not the task that waits for them.
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise PeerLost(peer, "the connection was closed") from error


def _failure_of(error: grpc.RpcError, peer: str) -> TwophaseError:
    failure = from_rpc_error(error, peer)
    # The caller of the router did neither: whoever configured the two did, or the server ended.
    if isinstance(failure, Unauthenticated | Cancelled):
        return PeerLost(peer, str(failure))
    return failure


class Duplex(Generic[Sent, Received]):
    """One bidirectional stream: `send` queues, iterating yields what comes back until it ends.

    The queue is not bounded here: callers bound what they have outstanding (active requests,
    unacknowledged pieces).
    """

    def __init__(self, peer: str, encode: Callable[[Sent], Any], decode: Callable[[Any], Received]):
        self._peer = peer
        self._encode = encode
        self._decode = decode
        self._outgoing: asyncio.Queue[Sent | None] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None

    def open(self, method: Callable[..., Any]) -> "Duplex[Sent, Received]":
        """Start the call on a stub's stream-stream method."""
        self._call = method(self._requests())
        return self

    async def _requests(self) -> AsyncIterator[Any]:  # Any: the stub's message type
        while (message := await self._outgoing.get()) is not None:
            yield self._encode(message)

    def send(self, message: Sent) -> None:
        """Queue `message`; order is kept."""
        self._outgoing.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[Received]:
        """What the peer sends; ends when it ends the stream, raises PeerLost when it breaks."""
        assert self._call is not None
        with _core_errors(self._peer):
            async for message in self._call:
                yield self._decode(message)

    def close(self) -> None:
        """End the call now; idempotent."""
        self._outgoing.put_nowait(None)
        if self._call is not None:
            self._call.cancel()


class Peer:
    """A connection to one worker's gRPC server.

    What the worker stamped with its own clock is told on ours, as far as its answers to `info` and
    `status` have shown how the two differ.
    """

    def __init__(
        self, address: str, clock: Clock, credentials: Credentials = Credentials()
    ) -> None:
        self.address = address
        self._clock = clock
        self._name = WorkerName(address)
        self._offset = ClockOffset()
        self._channel = credentials.open_channel(grpc.aio, address, PEER_OPTIONS)
        self._worker = pb_grpc.WorkerStub(self._channel)
        self._prefill = pb_grpc.PrefillWorkerStub(self._channel)
        self._decode = pb_grpc.DecodeWorkerStub(self._channel)

    @property
    def worker_clock(self) -> WorkerClock:
        """How the worker's clock differs from ours, as it is known now."""
        return self._offset.of(self._name)

    async def info(self, timeout_s: float) -> WorkerInfo:
        """What the worker is; waits up to `timeout_s` for it to listen."""
        with _core_errors(self.address):
            asked_s = self._clock.now_s()
            message = await self._worker.GetInfo(
                pb.GetInfoRequest(), timeout=timeout_s, wait_for_ready=True
            )
            self._offset.sample(asked_s, message.clock_s, self._clock.now_s())
            self._name = WorkerName(message.name)
            return info_wire.info_from_wire(message)

    async def status(self, timeout_s: float) -> WorkerStatus:
        """What the worker holds."""
        with _core_errors(self.address):
            asked_s = self._clock.now_s()
            message = await self._worker.GetWorkerStatus(
                pb.GetWorkerStatusRequest(), timeout=timeout_s
            )
            self._offset.sample(asked_s, message.clock_s, self._clock.now_s())
            return status_wire.status_from_wire(message)

    async def blocks(self, timeout_s: float) -> list[BlockHolder]:
        """Every block of the worker that is not free, and for whom."""
        with _core_errors(self.address):
            message = await self._worker.ListBlocks(pb.ListBlocksRequest(), timeout=timeout_s)
            return [status_wire.holder_from_wire(holder) for holder in message.holders]

    async def steps(self, window_s: float, timeout_s: float) -> list[StepFacts]:
        """What a decode worker's engine did in the last `window_s`, oldest first."""
        with _core_errors(self.address):
            request = pb.ListStepsRequest(window_s=window_s)
            message = await self._decode.ListSteps(request, timeout=timeout_s)
            return [event_wire.step_from_wire(step, self.worker_clock) for step in message.steps]

    def prefill(
        self, request: Request, reservation: RemoteReservation
    ) -> AsyncGenerator[PrefillEvent, None]:
        """FirstToken, then TransferReport; closing the iterator cancels the prefill."""
        now_s = self._clock.now_s()
        message = pb.PrefillRequest(
            request=worker_wire.request_to_wire(request, now_s),
            reservation=worker_wire.reservation_to_wire(reservation),
        )
        timeout_s = max(request.deadline_s - now_s, 0.0)
        return self._events(lambda: self._prefill.Prefill(message, timeout=timeout_s))

    def migrate(
        self, held_id: RequestId, request: Request, reservation: RemoteReservation
    ) -> AsyncGenerator[PrefillEvent, None]:
        """As `prefill`, of a decode worker that holds the KV cache under that id."""
        now_s = self._clock.now_s()
        message = pb.MigrateRequest(
            request=worker_wire.request_to_wire(request, now_s),
            reservation=worker_wire.reservation_to_wire(reservation),
            held_id=held_id,
        )
        timeout_s = max(request.deadline_s - now_s, 0.0)
        return self._events(lambda: self._decode.Migrate(message, timeout=timeout_s))

    async def _events(
        self,
        start: Callable[[], Any],  # Any: grpc's call
    ) -> AsyncGenerator[PrefillEvent, None]:
        call = start()
        try:
            with _core_errors(self.address):
                async for event in call:
                    yield worker_wire.prefill_event_from_wire(event, self.worker_clock)
        finally:
            call.cancel()

    def session(self) -> Duplex[DecodeCommand, DecodeUpdate]:
        """This router's stream to a decode worker."""
        session: Duplex[DecodeCommand, DecodeUpdate] = Duplex(
            self.address,
            lambda command: worker_wire.command_to_wire(command, self._clock.now_s()),
            lambda message: worker_wire.update_from_wire(message, self.worker_clock),
        )
        return session.open(self._decode.Session)

    def link(self) -> Duplex[LinkUp, LinkDown]:
        """The control side of a KV link to a decode worker."""
        link: Duplex[LinkUp, LinkDown] = Duplex(
            self.address, link_wire.up_to_wire, link_wire.down_from_wire
        )
        return link.open(self._decode.Link)

    async def close(self) -> None:
        """Close the connection; calls on it end as cancelled."""
        await self._channel.close()


def lost(peer: str, error: Exception | None) -> PeerLost:
    """The PeerLost that tells why a stream to `peer` ended."""
    return error if isinstance(error, PeerLost) else PeerLost(peer, str(error or "stream ended"))
