"""Streams through the front door, timed against the moment when the double emitted each token.

Both clients do as little as they can, so that the router is the one at its limit: gRPC messages are
not unpacked beyond protobuf, SSE events are counted as they stand in the bytes.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field

import grpc

from core.request import RequestId
from core.sampling import Sampling
from twophase.client.messages import generate_request

TIMEOUT_S = 60.0
_EVENT_END = b"\n\n"


@dataclass(slots=True)
class Received:
    """What clients got: messages or events, their tokens, and how late each token was."""

    emitted_s: dict[RequestId, list[float]]
    first_s: float = 0.0
    last_s: float = 0.0
    num_messages: int = 0
    num_tokens: int = 0
    delays_s: list[float] = field(default_factory=list)

    def message(self, request_id: RequestId, first: int, num_tokens: int) -> None:
        """A message with the tokens first, first + 1, ... of a request has come now."""
        now_s = time.monotonic()
        emitted_s = self.emitted_s[request_id]
        self.first_s, self.last_s = self.first_s or now_s, now_s
        self.num_messages += 1
        self.num_tokens += num_tokens
        for index in range(first, first + num_tokens):
            self.delays_s.append(now_s - emitted_s[index])

    @property
    def seconds(self) -> float:
        """From the first message to the last."""
        return self.last_s - self.first_s

    @property
    def emitting_seconds(self) -> float:
        """From the first token's emission to the last one's."""
        emitted_s = [at_s for tokens_s in self.emitted_s.values() for at_s in tokens_s]
        return max(emitted_s) - min(emitted_s)


class GrpcLoad:
    """Streams of `Generate` over one connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        request = generate_request([1], Sampling(), "", "")
        self._generate = self._channel.unary_stream(
            "/twophase.v1.Inference/Generate",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_num_tokens,
        )

    async def stream(self, request_id: RequestId, num_tokens: int, received: Received) -> None:
        """One request to its end."""
        sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
        message = generate_request([1, 2, 3], sampling, request_id, "")
        num_received = 0
        async for num_new in self._generate(message, timeout=TIMEOUT_S):
            if num_new:
                received.message(request_id, num_received, num_new)
                num_received += num_new
        if num_received != num_tokens:
            raise AssertionError(f"{request_id} brought {num_received} of {num_tokens} tokens")

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


def _num_tokens(message: bytes) -> int:
    """Token ids of a GenerateResponse, read off its bytes: field 1 is text, field 2 packed ids."""
    at = 0
    if message[:1] == b"\x0a":
        at = 2 + message[1]
    if message[at : at + 1] != b"\x12":
        return 0
    ids = message[at + 2 : at + 2 + message[at + 1]]
    return sum(byte < 0x80 for byte in ids)


class SseLoad:
    """Streams of /v1/completions, a connection for each."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def stream(self, request_id: RequestId, num_tokens: int, received: Received) -> None:
        """One request to its end; the router's own id takes the place of `request_id`."""
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            writer.write(self._request(num_tokens))
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                await self._events(_request_id_of(head), num_tokens, received, reader)
        finally:
            writer.close()

    def _request(self, num_tokens: int) -> bytes:
        body = json.dumps(
            {"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"host: {self._host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _events(
        self,
        request_id: RequestId,
        num_tokens: int,
        received: Received,
        reader: asyncio.StreamReader,
    ) -> None:
        num_received, tail = 0, b""
        while num_received < num_tokens:
            data = await reader.read(1 << 16)
            if not data:
                raise AssertionError(f"the stream ended after {num_received} events")
            for _ in range((tail + data).count(_EVENT_END)):
                if num_received < num_tokens:  # the others close the stream
                    received.message(request_id, num_received, 1)
                    num_received += 1
            tail = b"" if data.endswith(_EVENT_END) else data[-1:]
        await reader.read()

    async def close(self) -> None:
        """Nothing is open between streams."""


def _request_id_of(head: bytes) -> RequestId:
    lines = head.decode("latin-1").lower().splitlines()
    if not lines[0].startswith("http/1.1 200"):
        raise AssertionError(lines[0])
    [value] = [line.partition(":")[2] for line in lines if line.startswith("x-request-id:")]
    return RequestId(value.strip())
