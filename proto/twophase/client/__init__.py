"""The public Python client: `Client` for plain code, `AsyncClient` for asyncio.

Both stream `core.completion.Chunk`s; the last one carries the Completion with usage and phases.
Errors are those of `core.errors`, with their fields and what was known of the answer::

    with Client("127.0.0.1:8100") as client:
        for chunk in client.generate("Once upon a time", Sampling(max_tokens=32)):
            print(chunk.text, end="")

Given several addresses, routers of one cluster, a client goes on at another when one is lost, also
in the middle of an answer (`routers`). What operators call is asked of the first; most of it is in
`admin`: `client.admin.workers()`.
"""

from core.completion import ChatMessage
from core.request import Priority, Sender
from core.sampling import Sampling
from twophase.client.asynchronous import AsyncClient
from twophase.client.blocking import Client
from twophase.client.messages import ClusterStatus, ModelInfo, Prompt

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
