"""What the public clients say and are told: from core types to messages, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.completion import ChatMessage
from core.request import Sender
from core.sampling import Sampling
from core.signals import Demand
from core.worker import BlockHolder, KvTotals, StuckWorker, WorkerStatus
from twophase.signals_wire import demand_from_wire
from twophase.status_wire import (
    holder_from_wire,
    kv_totals_from_wire,
    status_from_wire,
    stuck_from_wire,
)
from twophase.v1 import admin_pb2
from twophase.v1 import inference_pb2 as pb
from twophase.wire import chat_messages_to_wire, put_sender, sampling_to_wire

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
    demand: Demand

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


def generate_request(
    prompt: Prompt,
    sampling: Sampling,
    request_id: str,
    model: str,
    sender: Sender = Sender(),
) -> pb.GenerateRequest:
    """What is asked, as a message; raises ValueError for a number that no field can hold."""
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=sampling_to_wire(sampling),
    )
    put_sender(sender, request)
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


def model_info(message: pb.GetModelResponse) -> ModelInfo:
    """What the endpoint serves, from its message."""
    return ModelInfo(message.model, message.vocab_size, message.max_context_tokens, message.mode)


def cluster_status(message: admin_pb2.GetStatusResponse) -> ClusterStatus:
    """What the router knows of its cluster, from its message."""
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
        demand=demand_from_wire(message.demand),
    )


def tokenize_request(prompt: str | Sequence[ChatMessage], model: str) -> pb.TokenizeRequest:
    """What is to be tokenized, as a message."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, prompt=prompt)
    return pb.TokenizeRequest(model=model, messages=chat_messages_to_wire(list(prompt)))


def audited_holders(message: admin_pb2.AuditBlocksResponse) -> list[tuple[BlockHolder, bool]]:
    """Every holder of KV blocks, and whether it is an orphan, from their message."""
    return [(holder_from_wire(audited.holder), audited.is_orphan) for audited in message.holders]
