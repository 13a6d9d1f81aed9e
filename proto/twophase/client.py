"""The public Python client: `Client` for plain code, `AsyncClient` for asyncio.

Both stream `core.completion.Chunk`s; the last one carries the Completion with usage and phases.
Errors are those of `core.errors`, with their fields::

    with Client("127.0.0.1:8100") as client:
        for chunk in client.generate("Once upon a time", Sampling(max_tokens=32)):
            print(chunk.text, end="")
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from core.completion import ChatMessage, Chunk
from core.request import RequestId, WorkerName
from core.sampling import Sampling
from core.worker import BlockHolder, KvTotals, StuckWorker, WorkerStatus
from twophase.errors import from_rpc_error
from twophase.peer import CHANNEL_OPTIONS
from twophase.status_wire import (
    holder_from_wire,
    kv_totals_from_wire,
    status_from_wire,
    stuck_from_wire,
)
from twophase.v1 import admin_pb2, admin_pb2_grpc
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chat_messages_to_wire, chunk_from_wire, sampling_to_wire

Prompt = str | Sequence[ChatMessage] | Sequence[int]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the endpoint serves."""

    model: str
    vocab_size: int
    max_context_tokens: int
    mode: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What the router knows of its cluster."""

    mode: str
    model: str
    is_ready: bool
    num_active_requests: int
    num_prefill_calls: int
    num_mailboxes: int
    kv: KvTotals
    silent_workers: tuple[str, ...]
    http_address: str
    stuck_workers: tuple[StuckWorker, ...]
    workers: tuple[WorkerStatus, ...]

    @property
    def held(self) -> dict[str, int]:
        """Every count, of router and workers, that is zero when the cluster is idle."""
        counts = {
            "router active requests": self.num_active_requests,
            "router prefill calls": self.num_prefill_calls,
            "router mailboxes": self.num_mailboxes,
            "silent workers": len(self.silent_workers),
        }
        for worker in self.workers:
            counts |= {f"{worker.name} {what}": count for what, count in worker.held.items()}
        return counts


def _generate_request(
    prompt: Prompt, sampling: Sampling, request_id: str, model: str
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=sampling_to_wire(sampling),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
        return request
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if messages:
        request.messages.CopyFrom(chat_messages_to_wire(messages))
    else:
        ids = [part for part in prompt if not isinstance(part, ChatMessage)]
        request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=ids))
    return request


def _model_info(message: pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(message.model, message.vocab_size, message.max_context_tokens, message.mode)


def _cluster_status(message: admin_pb2.GetStatusResponse) -> ClusterStatus:
    return ClusterStatus(
        mode=message.mode,
        model=message.model,
        is_ready=message.is_ready,
        num_active_requests=message.num_active_requests,
        num_prefill_calls=message.num_prefill_calls,
        num_mailboxes=message.num_mailboxes,
        kv=kv_totals_from_wire(message.kv),
        silent_workers=tuple(message.silent_workers),
        http_address=message.http_address,
        stuck_workers=tuple(stuck_from_wire(worker) for worker in message.stuck_workers),
        workers=tuple(status_from_wire(worker) for worker in message.workers),
    )


class Client:
    """A blocking client of one endpoint; may be shared between threads."""

    def __init__(self, address: str = "127.0.0.1:8100") -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request.

        Args:
            prompt: text, a conversation, or token ids.
            sampling: how to choose tokens.
            request_id: made by the server when empty.
            model: refused if it is not the one served; empty takes that one.
            timeout_s: deadline of the whole request.
        """
        message = _generate_request(prompt, sampling, request_id, model)
        call = self._inference.Generate(message, timeout=timeout_s)
        try:
            for response in call:
                yield chunk_from_wire(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            call.cancel()

    def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        try:
            return _model_info(self._inference.GetModel(pb.GetModelRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        try:
            return _cluster_status(self._admin.GetStatus(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    def audit_blocks(self, *, timeout_s: float = 5.0) -> list[tuple[BlockHolder, bool]]:
        """Every holder of KV blocks, and whether it is an orphan: no request of this router."""
        request = admin_pb2.AuditBlocksRequest()
        try:
            message = self._admin.AuditBlocks(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        return [
            (holder_from_wire(audited.holder), audited.is_orphan) for audited in message.holders
        ]

    def close(self) -> None:
        """Close the connection; running streams end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()


class AsyncClient:
    """A client of one endpoint for asyncio; bound to the running loop."""

    def __init__(self, address: str = "127.0.0.1:8100") -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """As Client.generate; closing or cancelling the iteration cancels the request."""
        message = _generate_request(prompt, sampling, request_id, model)
        call = self._inference.Generate(message, timeout=timeout_s)
        try:
            async for response in call:
                yield chunk_from_wire(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            call.cancel()

    async def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        try:
            message = await self._inference.GetModel(pb.GetModelRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        return _model_info(message)

    async def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        try:
            message = await self._admin.GetStatus(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        return _cluster_status(message)

    async def add_worker(self, address: str, *, timeout_s: float = 30.0) -> WorkerName:
        """Make a worker known to the router; returns its name."""
        request = admin_pb2.AddWorkerRequest(address=address)
        try:
            message = await self._admin.AddWorker(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        return WorkerName(message.name)

    async def remove_worker(self, address: str, *, timeout_s: float = 5.0) -> None:
        """Make the router forget a worker."""
        request = admin_pb2.RemoveWorkerRequest(address=address)
        try:
            await self._admin.RemoveWorker(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    async def close(self) -> None:
        """Close the connection; running streams end as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection."""
        await self.close()


__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Client",
    "ClusterStatus",
    "ModelInfo",
    "Prompt",
    "RequestId",
    "Sampling",
]
