from twophase.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_RECEIVED: _ClassVar[EventKind]
    EVENT_KIND_TOKENIZE: _ClassVar[EventKind]
    EVENT_KIND_LINE: _ClassVar[EventKind]
    EVENT_KIND_PLACED: _ClassVar[EventKind]
    EVENT_KIND_RESERVE: _ClassVar[EventKind]
    EVENT_KIND_QUEUE: _ClassVar[EventKind]
    EVENT_KIND_CHUNK: _ClassVar[EventKind]
    EVENT_KIND_PUSH: _ClassVar[EventKind]
    EVENT_KIND_TRANSFER: _ClassVar[EventKind]
    EVENT_KIND_FIRST_TOKEN: _ClassVar[EventKind]
    EVENT_KIND_SEALED: _ClassVar[EventKind]
    EVENT_KIND_SLOT_WAIT: _ClassVar[EventKind]
    EVENT_KIND_STEPS: _ClassVar[EventKind]
    EVENT_KIND_GAP: _ClassVar[EventKind]
    EVENT_KIND_DELIVERIES: _ClassVar[EventKind]
    EVENT_KIND_SLOW_DELIVERY: _ClassVar[EventKind]
    EVENT_KIND_LAST_TOKEN: _ClassVar[EventKind]
    EVENT_KIND_FAILED: _ClassVar[EventKind]
    EVENT_KIND_END: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_RECEIVED: EventKind
EVENT_KIND_TOKENIZE: EventKind
EVENT_KIND_LINE: EventKind
EVENT_KIND_PLACED: EventKind
EVENT_KIND_RESERVE: EventKind
EVENT_KIND_QUEUE: EventKind
EVENT_KIND_CHUNK: EventKind
EVENT_KIND_PUSH: EventKind
EVENT_KIND_TRANSFER: EventKind
EVENT_KIND_FIRST_TOKEN: EventKind
EVENT_KIND_SEALED: EventKind
EVENT_KIND_SLOT_WAIT: EventKind
EVENT_KIND_STEPS: EventKind
EVENT_KIND_GAP: EventKind
EVENT_KIND_DELIVERIES: EventKind
EVENT_KIND_SLOW_DELIVERY: EventKind
EVENT_KIND_LAST_TOKEN: EventKind
EVENT_KIND_FAILED: EventKind
EVENT_KIND_END: EventKind

class Event(_message.Message):
    __slots__ = ("kind", "begin_s", "end_s", "where", "attempt", "uncertainty_s", "index", "count", "busy_s", "num_tokens", "num_cached_tokens", "num_bytes", "first_layer", "num_layers", "num_sequences", "num_history_tokens", "request_ids", "note")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_S_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    begin_s: float
    end_s: float
    where: str
    attempt: int
    uncertainty_s: float
    index: int
    count: int
    busy_s: float
    num_tokens: int
    num_cached_tokens: int
    num_bytes: int
    first_layer: int
    num_layers: int
    num_sequences: int
    num_history_tokens: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    note: str
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., begin_s: _Optional[float] = ..., end_s: _Optional[float] = ..., where: _Optional[str] = ..., attempt: _Optional[int] = ..., uncertainty_s: _Optional[float] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., busy_s: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_history_tokens: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., note: _Optional[str] = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("worker", "offset_s", "uncertainty_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    offset_s: float
    uncertainty_s: float
    def __init__(self, worker: _Optional[str] = ..., offset_s: _Optional[float] = ..., uncertainty_s: _Optional[float] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("completion", "events", "is_running", "now_s", "now_wall_s", "clocks")
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    NOW_WALL_S_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    completion: _inference_pb2.Completion
    events: _containers.RepeatedCompositeFieldContainer[Event]
    is_running: bool
    now_s: float
    now_wall_s: float
    clocks: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    def __init__(self, completion: _Optional[_Union[_inference_pb2.Completion, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., is_running: _Optional[bool] = ..., now_s: _Optional[float] = ..., now_wall_s: _Optional[float] = ..., clocks: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ...) -> None: ...
