"""The client for plain code; may be shared between threads."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from core.completion import ChatMessage, Chunk
from core.errors import TwophaseError
from core.request import Sender
from core.sampling import Sampling
from core.settings.security import Tls
from core.worker import BlockHolder
from twophase.client.admin import Admin
from twophase.client.calls import call
from twophase.client.messages import (
    ClusterStatus,
    ModelInfo,
    Prompt,
    audited_holders,
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


class Client:
    """A blocking client of one cluster; may be shared between threads."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8100",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Prepare to call the router, or any of several, at `address`.

        An API key and TLS are shown where routers ask for them.

        Raises:
            ConfigError: they, or the addresses, cannot be used.
        """
        self._routers = Routers(grpc, address, Credentials(api_key, tls))
        self._first = self._routers.all[0]
        self.address = self._first.address
        self.admin = Admin(self._first.admin, self.address)

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
        asking = Asking(message, self._routers, timeout_s)
        while not asking.is_over:
            router = asking.router
            stream = router.inference.Generate(asking.message, timeout=asking.remaining_s)
            try:
                for response in stream:
                    yield asking.take(response)
            except grpc.RpcError as error:
                time.sleep(asking.lost(from_rpc_error(error, router.address)))
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
        asking = Asking(message, self._routers, timeout_s)
        while True:
            router, request = asking.router, pb.GenerateOnceRequest(request=asking.message)
            method, remaining_s = router.inference.GenerateOnce, asking.remaining_s
            try:
                reply = call(router.address, method, request, remaining_s)
            except TwophaseError as error:
                time.sleep(asking.lost(error))
            else:
                return [asking.take(answer) for answer in (reply.answer, *reply.other_answers)]

    def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """End a request by its id at whatever router; False if it was not running (any more)."""
        request, is_found = pb.CancelRequest(request_id=request_id), False
        for router in self._routers.all:
            method = router.inference.Cancel
            with self._routers.loss_of_one():
                reply = call(router.address, method, request, timeout_s)
                is_found = is_found or bool(reply.found)
        return is_found

    def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float = 10.0
    ) -> tuple[int, ...]:
        """The token ids that `generate` would take the prompt for."""
        request = tokenize_request(prompt, model)
        return tuple(
            self._ask(lambda router: router.inference.Tokenize, request, timeout_s).token_ids
        )

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0
    ) -> str:
        """The text of an answer of these tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._ask(lambda router: router.inference.Detokenize, request, timeout_s).text)

    def model(self, *, timeout_s: float = 5.0) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelRequest()
        return model_info(self._ask(lambda router: router.inference.GetModel, request, timeout_s))

    def status(self, *, timeout_s: float = 5.0) -> ClusterStatus:
        """Pools, workers and what they hold."""
        request = admin_pb2.GetStatusRequest()
        return cluster_status(call(self.address, self._first.admin.GetStatus, request, timeout_s))

    def audit_blocks(self, *, timeout_s: float = 5.0) -> list[tuple[BlockHolder, bool]]:
        """Every holder of KV blocks, and whether it is an orphan: no request of this router."""
        request = admin_pb2.AuditBlocksRequest()
        return audited_holders(
            call(self.address, self._first.admin.AuditBlocks, request, timeout_s)
        )

    def close(self) -> None:
        """Close the connections; running streams end as cancelled."""
        for router in self._routers.all:
            router.channel.close()

    # Any: messages of all kinds.
    def _ask(self, method: Method, request: Any, timeout_s: float) -> Any:
        tries = Tries(self._routers)
        while True:
            router = tries.router
            try:
                return call(router.address, method(router), request, timeout_s)
            except TwophaseError as error:
                time.sleep(tries.lost(error))

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
