"""The routers that one client may ask, and how an answer outlives the one that it came from.

A client that knows several routers of one cluster asks the one that answered last. When it is lost
in the middle of an answer, the next is told which tokens are there already, and the stream goes on
behind them: each token comes once, and they are those of an undisturbed stream. When every router
was lost in a row, all are asked again, for PATIENCE_S since the first of them: a router is started
again in less. Then, without a token in between, the last error is raised. A client of one router
raises it at once, as it is for several answers to one prompt, which are not gone on with.
"""

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from core.completion import Chunk
from core.errors import ConfigError, PeerLost, TwophaseError
from twophase.credentials import Credentials
from twophase.errors import status_code
from twophase.peer import CHANNEL_OPTIONS
from twophase.v1 import admin_pb2_grpc
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chunk_from_wire

PATIENCE_S = 10.0
# From one round of all routers to the next.
ROUND_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """One of them: its address and what may be called there."""

    address: str
    channel: Any  # Any: channels and stubs of grpc have no types of their own
    inference: Any
    admin: Any


class Routers:
    """All of them, in the order in which they were named; may be shared between threads."""

    def __init__(
        self, maker: Any, address: str | Sequence[str], credentials: Credentials
    ) -> None:  # Any: `maker` is grpc or grpc.aio
        """Prepare to call each; none is asked yet.

        Raises:
            ConfigError: no address is given, or certificates cannot be used.
        """
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses:
            raise ConfigError("address", "names no router")
        self.all = tuple(_router(maker, address, credentials) for address in addresses)
        self._current = 0
        self._lock = threading.Lock()

    @property
    def current(self) -> Router:
        """Whom to ask."""
        return self.all[self._current]

    def lost(self, router: Router) -> None:
        """Ask the next one from now on; nothing happens if `router` is not asked any more."""
        with self._lock:
            if self.current is router:
                self._current = (self._current + 1) % len(self.all)

    @contextmanager
    def loss_of_one(self) -> Iterator[None]:
        """For what every router is asked: that one is lost matters only if it is the only one."""
        try:
            yield
        except PeerLost:
            if len(self.all) == 1:
                raise


def _router(maker: Any, address: str, credentials: Credentials) -> Router:
    channel = credentials.open_channel(maker, address, CHANNEL_OPTIONS)
    stubs = pb_grpc.InferenceStub(channel), admin_pb2_grpc.AdminStub(channel)
    return Router(address, channel, *stubs)


class Tries:
    """Who is asked in one call: `router`, until it is lost and the next one is."""

    def __init__(self, routers: Routers) -> None:
        self.router = routers.current
        self._routers = routers
        self._num_lost_in_a_row = 0
        self._first_lost_s = 0.0

    def answered(self) -> None:
        """The router said something that is of use."""
        self._num_lost_in_a_row = 0

    def lost(self, error: TwophaseError) -> float:
        """The router failed the call; how many seconds to wait before the next one is asked.

        Raises `error` if no other could make it good.
        """
        if status_code(error) is not grpc.StatusCode.UNAVAILABLE:
            raise error
        self._routers.lost(self.router)
        now_s, num_routers = time.monotonic(), len(self._routers.all)
        if self._num_lost_in_a_row == 0:
            self._first_lost_s = now_s
        self._num_lost_in_a_row += 1
        is_round_over = self._num_lost_in_a_row % num_routers == 0
        if num_routers == 1 or (is_round_over and now_s - self._first_lost_s >= PATIENCE_S):
            raise error
        self.router = self._routers.current
        return ROUND_S if is_round_over else 0.0


class Asking:
    """One request and what its caller has of the answer; `message` is what is sent next.

    Invariant: message.resumption, once set, holds every token that was taken, in order.
    """

    def __init__(
        self, message: pb.GenerateRequest, routers: Routers, timeout_s: float | None
    ) -> None:
        if len(routers.all) > 1 and not message.request_id:
            message.request_id = uuid.uuid4().hex  # the same at each
        self.message = message
        self.is_over = False
        self._tries = Tries(routers)
        self._num_missing = max(message.sampling.n, 1)
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._token_ids: list[int] = []
        self._num_told = self._num_told_again = 0

    @property
    def router(self) -> Router:
        """Whom to send it to."""
        return self._tries.router

    @property
    def remaining_s(self) -> float | None:
        """What is left of the deadline; None without one."""
        return None if self._until_s is None else max(self._until_s - time.monotonic(), 0.0)

    def take(self, response: pb.GenerateResponse) -> Chunk:
        """What the caller is given next."""
        if response.token_ids:
            self._tries.answered()
        self._token_ids += response.token_ids
        self._num_missing -= response.HasField("completion")
        self.is_over = self._num_missing == 0
        if response.HasField("seed"):
            self.message.sampling.seed = response.seed
        return self._without_what_was_told(chunk_from_wire(response))

    def _without_what_was_told(self, chunk: Chunk) -> Chunk:
        """The prompt's log-probabilities are told anew by a router that begins with it."""
        num_again = min(self._num_told_again, len(chunk.prompt_logprobs))
        self._num_told_again -= num_again
        self._num_told += len(chunk.prompt_logprobs) - num_again
        return replace(chunk, prompt_logprobs=chunk.prompt_logprobs[num_again:])

    def lost(self, error: TwophaseError) -> float:
        """As `Tries.lost`."""
        if self.is_over:
            return 0.0  # nothing is missing
        wait_s = self._tries.lost(error)
        if self.message.sampling.n > 1:
            raise error  # who has which tokens of which answer cannot be said in one request
        self.message.resumption.SetInParent()
        self.message.resumption.token_ids[:] = self._token_ids
        # With the first token all of them were told, and no router tells them any more.
        self._num_told_again = 0 if self._token_ids else self._num_told
        return wait_s
