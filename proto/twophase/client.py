"""The public Python client: `Client` for plain code, `AsyncClient` for asyncio.

Both stream `core.completion.Chunk`s; the last one carries the Completion with usage and phases.
Errors are those of `core.errors`, with their fields and what was known of the answer::

    with Client("127.0.0.1:8100") as client:
        for chunk in client.generate("Once upon a time", Sampling(max_tokens=32)):
            print(chunk.text, end="")

What operators call is in `admin`: `client.admin.workers()`.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from core.completion import ChatMessage, Chunk
from core.request import Priority, RequestId, Sender, WorkerName
from core.sampling import Sampling
from core.security import Tls
from core.worker import BlockHolder
from twophase.admin_client import Admin, AsyncAdmin
from twophase.calls import call, call_async
from twophase.client_wire import (
    ClusterStatus,
    ModelInfo,
    Prompt,
    audited_holders,
    cluster_status,
    generate_request,
    model_info,
    tokenize_request,
)
from twophase.credentials import Credentials
from twophase.errors import from_rpc_error
from twophase.peer import CHANNEL_OPTIONS
from twophase.v1 import admin_pb2, admin_pb2_grpc
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chunk_from_wire


class Client:
    """A blocking client of one endpoint; may be shared between threads."""

    def __init__(
        self,
        address: str = "127.0.0.1:8100",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Prepare to call `address`, with an API key and TLS where the router asks for them."""
        self.address = address
        credentials = Credentials(api_key, tls)
        self._channel = credentials.open_channel(grpc, address, CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self.admin = Admin(self._admin, address)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> Iterator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request.

        With sampling.n the chunks of several answers, told apart by `index`, each with a last one.

        Args:
            prompt: text, a conversation, or token ids.
            sampling: how to choose tokens.
            request_id: made by the server when empty.
            model: refused if it is not the one served; empty takes that one.
            timeout_s: deadline of the whole request.
            sender: on whose behalf: session, priority, client.
        """
        message = generate_request(prompt, sampling, request_id, model, sender)
        stream = self._inference.Generate(message, timeout=timeout_s)
        try:
            for response in stream:
                yield chunk_from_wire(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            stream.cancel()

    def generate_once(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> Chunk:
        """The whole answer as one chunk, the first if there are several; as for `generate`."""
        answers = self.generate_all(
            prompt,
            sampling,
            request_id=request_id,
            model=model,
            timeout_s=timeout_s,
            sender=sender,
        )
        return answers[0]

    def generate_all(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> list[Chunk]:
        """Each of sampling.n answers as one chunk, by index; arguments as for `generate`."""
        message = generate_request(prompt, sampling, request_id, model, sender)
        request = pb.GenerateOnceRequest(request=message)
        reply = call(self.address, self._inference.GenerateOnce, request, timeout_s)
        return [chunk_from_wire(answer) for answer in (reply.answer, *reply.other_answers)]

    def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """End a request by its id; False if it was not running (any more)."""
        request = pb.CancelRequest(request_id=request_id)
        return bool(call(self.address, self._inference.Cancel, request, timeout_s).found)

    def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float = 10.0
    ) -> tuple[int, ...]:
        """The token ids that `generate` would take the prompt for."""
        request = tokenize_request(prompt, model)
        return tuple(call(self.address, self._inference.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0
    ) -> str:
        """The text of an answer of these tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(call(self.address, self._inference.Detokenize, request, timeout_s).text)

    def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelRequest()
        return model_info(call(self.address, self._inference.GetModel, request, timeout_s))

    def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        return cluster_status(call(self.address, self._admin.GetStatus, request, timeout_s))

    def audit_blocks(self, *, timeout_s: float = 5.0) -> list[tuple[BlockHolder, bool]]:
        """Every holder of KV blocks, and whether it is an orphan: no request of this router."""
        request = admin_pb2.AuditBlocksRequest()
        return audited_holders(call(self.address, self._admin.AuditBlocks, request, timeout_s))

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

    def __init__(
        self,
        address: str = "127.0.0.1:8100",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """As Client."""
        self.address = address
        credentials = Credentials(api_key, tls)
        self._channel = credentials.open_channel(grpc.aio, address, CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self.admin = AsyncAdmin(self._admin, address)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> AsyncIterator[Chunk]:
        """As Client.generate; closing or cancelling the iteration cancels the request."""
        message = generate_request(prompt, sampling, request_id, model, sender)
        stream = self._inference.Generate(message, timeout=timeout_s)
        try:
            async for response in stream:
                yield chunk_from_wire(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            stream.cancel()

    async def generate_once(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> Chunk:
        """The whole answer as one chunk, the first if there are several; as for `generate`."""
        answers = await self.generate_all(
            prompt,
            sampling,
            request_id=request_id,
            model=model,
            timeout_s=timeout_s,
            sender=sender,
        )
        return answers[0]

    async def generate_all(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        sender: Sender = Sender(),
    ) -> list[Chunk]:
        """Each of sampling.n answers as one chunk, by index; arguments as for `generate`."""
        message = generate_request(prompt, sampling, request_id, model, sender)
        request = pb.GenerateOnceRequest(request=message)
        reply = await call_async(self.address, self._inference.GenerateOnce, request, timeout_s)
        return [chunk_from_wire(answer) for answer in (reply.answer, *reply.other_answers)]

    async def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """End a request by its id; False if it was not running (any more)."""
        request = pb.CancelRequest(request_id=request_id)
        reply = await call_async(self.address, self._inference.Cancel, request, timeout_s)
        return bool(reply.found)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float = 10.0
    ) -> tuple[int, ...]:
        """The token ids that `generate` would take the prompt for."""
        request = tokenize_request(prompt, model)
        reply = await call_async(self.address, self._inference.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0
    ) -> str:
        """The text of an answer of these tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        reply = await call_async(self.address, self._inference.Detokenize, request, timeout_s)
        return str(reply.text)

    async def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelRequest()
        reply = await call_async(self.address, self._inference.GetModel, request, timeout_s)
        return model_info(reply)

    async def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        reply = await call_async(self.address, self._admin.GetStatus, request, timeout_s)
        return cluster_status(reply)

    async def add_worker(self, address: str, *, timeout_s: float = 30.0) -> WorkerName:
        """Make a worker known to the router; returns its name."""
        request = admin_pb2.AddWorkerRequest(address=address)
        reply = await call_async(self.address, self._admin.AddWorker, request, timeout_s)
        return WorkerName(reply.name)

    async def remove_worker(self, address: str, *, timeout_s: float = 5.0) -> None:
        """Make the router forget a worker."""
        request = admin_pb2.RemoveWorkerRequest(address=address)
        await call_async(self.address, self._admin.RemoveWorker, request, timeout_s)

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
    "Priority",
    "Prompt",
    "RequestId",
    "Sampling",
    "Sender",
    "Tls",
]
