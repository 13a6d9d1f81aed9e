from twophase.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("mode", "model", "is_ready", "num_active_requests", "workers", "num_prefill_calls", "num_mailboxes", "kv", "silent_workers", "http_address", "stuck_workers")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_MAILBOXES_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STUCK_WORKERS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    model: str
    is_ready: bool
    num_active_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.WorkerStatus]
    num_prefill_calls: int
    num_mailboxes: int
    kv: KvTotals
    silent_workers: _containers.RepeatedScalarFieldContainer[str]
    http_address: str
    stuck_workers: _containers.RepeatedCompositeFieldContainer[StuckWorker]
    def __init__(self, mode: _Optional[str] = ..., model: _Optional[str] = ..., is_ready: _Optional[bool] = ..., num_active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[_worker_pb2.WorkerStatus, _Mapping]]] = ..., num_prefill_calls: _Optional[int] = ..., num_mailboxes: _Optional[int] = ..., kv: _Optional[_Union[KvTotals, _Mapping]] = ..., silent_workers: _Optional[_Iterable[str]] = ..., http_address: _Optional[str] = ..., stuck_workers: _Optional[_Iterable[_Union[StuckWorker, _Mapping]]] = ...) -> None: ...

class StuckWorker(_message.Message):
    __slots__ = ("name", "address", "why", "age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    why: str
    age_s: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., why: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class KvTotals(_message.Message):
    __slots__ = ("num_transferred_tokens", "num_decode_cached_tokens", "num_local_prefill_tokens", "num_sealed_handoffs", "num_failed_handoffs")
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    num_transferred_tokens: int
    num_decode_cached_tokens: int
    num_local_prefill_tokens: int
    num_sealed_handoffs: int
    num_failed_handoffs: int
    def __init__(self, num_transferred_tokens: _Optional[int] = ..., num_decode_cached_tokens: _Optional[int] = ..., num_local_prefill_tokens: _Optional[int] = ..., num_sealed_handoffs: _Optional[int] = ..., num_failed_handoffs: _Optional[int] = ...) -> None: ...

class AuditBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditBlocksResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[AuditedHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[AuditedHolder, _Mapping]]] = ...) -> None: ...

class AuditedHolder(_message.Message):
    __slots__ = ("holder", "is_orphan")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    IS_ORPHAN_FIELD_NUMBER: _ClassVar[int]
    holder: _worker_pb2.BlockHolder
    is_orphan: bool
    def __init__(self, holder: _Optional[_Union[_worker_pb2.BlockHolder, _Mapping]] = ..., is_orphan: _Optional[bool] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
