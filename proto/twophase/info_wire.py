"""What a worker is, and the shape of its KV blocks: core types to messages and back."""

from core.layout import Dtype, KVLayout
from core.request import WorkerName
from core.worker import Role, WorkerInfo
from twophase.v1 import worker_pb2 as pb


def layout_to_wire(layout: KVLayout) -> pb.Layout:
    """A KV layout as a message."""
    return pb.Layout(
        weights_hash=layout.weights_hash,
        dtype=layout.dtype.value,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        tensor_parallel_size=layout.tensor_parallel_size,
        protocol_version=layout.protocol_version,
    )


def layout_from_wire(message: pb.Layout) -> KVLayout:
    """A KV layout from its message."""
    return KVLayout(
        weights_hash=message.weights_hash,
        dtype=Dtype(message.dtype),
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        tensor_parallel_size=message.tensor_parallel_size,
        protocol_version=message.protocol_version,
    )


def info_to_wire(info: WorkerInfo, clock_s: float = 0.0) -> pb.WorkerInfo:
    """What a worker is, as a message; clock_s is its clock as it answers."""
    return pb.WorkerInfo(
        name=info.name,
        role=info.role.value,
        incarnation=info.incarnation,
        model=info.model,
        layout=layout_to_wire(info.layout),
        num_blocks=info.num_blocks,
        max_context_tokens=info.max_context_tokens,
        vocab_size=info.vocab_size,
        max_num_sequences=info.max_num_sequences,
        kernels=info.kernels,
        clock_s=clock_s,
    )


def info_from_wire(message: pb.WorkerInfo) -> WorkerInfo:
    """What a worker is, from its message."""
    return WorkerInfo(
        name=WorkerName(message.name),
        role=Role(message.role),
        incarnation=message.incarnation,
        model=message.model,
        layout=layout_from_wire(message.layout),
        num_blocks=message.num_blocks,
        max_context_tokens=message.max_context_tokens,
        vocab_size=message.vocab_size,
        max_num_sequences=message.max_num_sequences,
        kernels=message.kernels,
    )
