"""Messages that tell those who scale pools what was measured, to core types and back."""

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from core.signals import Demand, Moments, Signals
from twophase.v1 import admin_pb2
from twophase.v1 import worker_pb2 as pb


def signals_to_wire(signals: Signals) -> pb.Signals:
    """What a worker measured, as a message."""
    return pb.Signals(**{f.name: getattr(signals, f.name) for f in fields(signals)})


def signals_from_wire(message: pb.Signals) -> Signals:
    """What a worker measured, from its message."""
    return Signals(**{f.name: _value(message, f.name) for f in fields(Signals)})


def demand_to_wire(demand: Demand) -> admin_pb2.Demand:
    """What a router is asked for, as a message."""
    return admin_pb2.Demand(
        requests_per_s=demand.requests_per_s,
        arrival_scv=demand.arrival_scv,
        num_prompt_tokens=_moments_to_wire(demand.num_prompt_tokens),
        decode_s=_moments_to_wire(demand.decode_s),
        num_in_line=demand.num_in_line,
        num_line_tokens=demand.num_line_tokens,
        oldest_in_line_s=demand.oldest_in_line_s,
        idle_s=demand.idle_s,
    )


def demand_from_wire(message: admin_pb2.Demand) -> Demand:
    """What a router is asked for, from its message."""
    return Demand(
        requests_per_s=message.requests_per_s,
        arrival_scv=message.arrival_scv,
        num_prompt_tokens=_moments_from_wire(message, "num_prompt_tokens"),
        decode_s=_moments_from_wire(message, "decode_s"),
        num_in_line=message.num_in_line,
        num_line_tokens=message.num_line_tokens,
        oldest_in_line_s=message.oldest_in_line_s,
        idle_s=message.idle_s,
    )


def _value(message: Message, name: str) -> Any:  # Any: the field's own type
    is_optional = message.DESCRIPTOR.fields_by_name[name].has_presence
    return None if is_optional and not message.HasField(name) else getattr(message, name)


def _moments_to_wire(moments: Moments | None) -> admin_pb2.Moments | None:
    return None if moments is None else admin_pb2.Moments(mean=moments.mean, scv=moments.scv)


def _moments_from_wire(message: Message, name: str) -> Moments | None:
    moments = _value(message, name)
    return None if moments is None else Moments(moments.mean, moments.scv)
