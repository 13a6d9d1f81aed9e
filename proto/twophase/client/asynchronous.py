"""The client for asyncio: as the blocking one, whose docstrings tell what it leaves out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from core.completion import ChatMessage, Chunk
from core.errors import TwophaseError
from core.request import Sender, WorkerName
from core.sampling import Sampling
from core.settings.security import Tls
from twophase.client.admin import AsyncAdmin
from twophase.client.calls import call_async
from twophase.client.messages import (
    ClusterStatus,
    ModelInfo,
    Prompt,
    cluster_status,
    generate_request,
    model_info,
    tokenize_request,
)
from twophase.client.routers import Asking, Router, Routers, Tries
from twophase.credentials import Credentials
from twophase.errors import from_rpc_error
from twophase.v1 import admin_pb2
from twophase.v1 import inference_pb2 as pb

# Any: stubs have no types of their own.
Method = Callable[[Router], Any]


class AsyncClient:
    """A client of one cluster for asyncio; bound to the running loop."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8100",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """As Client."""
        self._routers = Routers(grpc.aio, address, Credentials(api_key, tls))
        self._first = self._routers.all[0]
        self.address = self._first.address
        self.admin = AsyncAdmin(self._first.admin, self.address)

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
        asking = Asking(message, self._routers, timeout_s)
        while not asking.is_over:
            router = asking.router
            stream = router.inference.Generate(asking.message, timeout=asking.remaining_s)
            try:
                async for response in stream:
                    yield asking.take(response)
            except grpc.RpcError as error:
                await asyncio.sleep(asking.lost(from_rpc_error(error, router.address)))
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
        asking = Asking(message, self._routers, timeout_s)
        while True:
            router, request = asking.router, pb.GenerateOnceRequest(request=asking.message)
            method, remaining_s = router.inference.GenerateOnce, asking.remaining_s
            try:
                reply = await call_async(router.address, method, request, remaining_s)
            except TwophaseError as error:
                await asyncio.sleep(asking.lost(error))
            else:
                return [asking.take(answer) for answer in (reply.answer, *reply.other_answers)]

    async def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """As Client.cancel."""
        request, is_found = pb.CancelRequest(request_id=request_id), False
        for router in self._routers.all:
            method = router.inference.Cancel
            with self._routers.loss_of_one():
                reply = await call_async(router.address, method, request, timeout_s)
                is_found = is_found or bool(reply.found)
        return is_found

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float = 10.0
    ) -> tuple[int, ...]:
        """The token ids that `generate` would take the prompt for."""
        request = tokenize_request(prompt, model)
        reply = await self._ask(lambda router: router.inference.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0
    ) -> str:
        """The text of an answer of these tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        reply = await self._ask(lambda router: router.inference.Detokenize, request, timeout_s)
        return str(reply.text)

    async def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelRequest()
        reply = await self._ask(lambda router: router.inference.GetModel, request, timeout_s)
        return model_info(reply)

    async def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        reply = await call_async(self.address, self._first.admin.GetStatus, request, timeout_s)
        return cluster_status(reply)

    async def add_worker(self, address: str, *, timeout_s: float = 30.0) -> WorkerName:
        """Make a worker known to the router; returns its name."""
        request = admin_pb2.AddWorkerRequest(address=address)
        reply = await call_async(self.address, self._first.admin.AddWorker, request, timeout_s)
        return WorkerName(reply.name)

    async def remove_worker(self, address: str, *, timeout_s: float = 5.0) -> None:
        """Make the router forget a worker."""
        request = admin_pb2.RemoveWorkerRequest(address=address)
        await call_async(self.address, self._first.admin.RemoveWorker, request, timeout_s)

    async def close(self) -> None:
        """Close the connections; running streams end as cancelled."""
        for router in self._routers.all:
            await router.channel.close()

    async def _ask(self, method: Method, request: Any, timeout_s: float) -> Any:
        tries = Tries(self._routers)
        while True:
            router = tries.router
            try:
                return await call_async(router.address, method(router), request, timeout_s)
            except TwophaseError as error:
                await asyncio.sleep(tries.lost(error))

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
