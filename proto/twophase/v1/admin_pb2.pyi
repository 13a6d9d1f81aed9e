from twophase.v1 import inference_pb2 as _inference_pb2
from twophase.v1 import timeline_pb2 as _timeline_pb2
from twophase.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_WARMING: _ClassVar[WorkerState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_RECEIVED: _ClassVar[RequestState]
    REQUEST_STATE_ADMITTED: _ClassVar[RequestState]
    REQUEST_STATE_RESERVING: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_TRANSFERRING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]

class Symptom(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYMPTOM_UNSPECIFIED: _ClassVar[Symptom]
    SYMPTOM_FIRST_TOKEN_LATE: _ClassVar[Symptom]
    SYMPTOM_LATER_TOKENS_SLOW: _ClassVar[Symptom]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_WARMING: WorkerState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_RECEIVED: RequestState
REQUEST_STATE_ADMITTED: RequestState
REQUEST_STATE_RESERVING: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_TRANSFERRING: RequestState
REQUEST_STATE_DECODING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
SYMPTOM_UNSPECIFIED: Symptom
SYMPTOM_FIRST_TOKEN_LATE: Symptom
SYMPTOM_LATER_TOKENS_SLOW: Symptom

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("mode", "model", "is_ready", "num_active_requests", "workers", "num_prefill_calls", "num_mailboxes", "kv", "silent_workers", "http_address", "stuck_workers", "demand")
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
    DEMAND_FIELD_NUMBER: _ClassVar[int]
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
    demand: Demand
    def __init__(self, mode: _Optional[str] = ..., model: _Optional[str] = ..., is_ready: _Optional[bool] = ..., num_active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[_worker_pb2.WorkerStatus, _Mapping]]] = ..., num_prefill_calls: _Optional[int] = ..., num_mailboxes: _Optional[int] = ..., kv: _Optional[_Union[KvTotals, _Mapping]] = ..., silent_workers: _Optional[_Iterable[str]] = ..., http_address: _Optional[str] = ..., stuck_workers: _Optional[_Iterable[_Union[StuckWorker, _Mapping]]] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("requests_per_s", "arrival_scv", "num_prompt_tokens", "decode_s", "num_in_line", "num_line_tokens", "oldest_in_line_s", "idle_s")
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_SCV_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_LINE_FIELD_NUMBER: _ClassVar[int]
    NUM_LINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_IN_LINE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    requests_per_s: float
    arrival_scv: float
    num_prompt_tokens: Moments
    decode_s: Moments
    num_in_line: int
    num_line_tokens: int
    oldest_in_line_s: float
    idle_s: float
    def __init__(self, requests_per_s: _Optional[float] = ..., arrival_scv: _Optional[float] = ..., num_prompt_tokens: _Optional[_Union[Moments, _Mapping]] = ..., decode_s: _Optional[_Union[Moments, _Mapping]] = ..., num_in_line: _Optional[int] = ..., num_line_tokens: _Optional[int] = ..., oldest_in_line_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class Moments(_message.Message):
    __slots__ = ("mean", "scv")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    SCV_FIELD_NUMBER: _ClassVar[int]
    mean: float
    scv: float
    def __init__(self, mean: _Optional[float] = ..., scv: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("num_transferred_tokens", "num_decode_cached_tokens", "num_local_prefill_tokens", "num_sealed_handoffs", "num_failed_handoffs", "num_migrations", "num_migrated_bytes", "failed_migrations")
    class FailedMigrationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    num_transferred_tokens: int
    num_decode_cached_tokens: int
    num_local_prefill_tokens: int
    num_sealed_handoffs: int
    num_failed_handoffs: int
    num_migrations: int
    num_migrated_bytes: int
    failed_migrations: _containers.ScalarMap[str, int]
    def __init__(self, num_transferred_tokens: _Optional[int] = ..., num_decode_cached_tokens: _Optional[int] = ..., num_local_prefill_tokens: _Optional[int] = ..., num_sealed_handoffs: _Optional[int] = ..., num_failed_handoffs: _Optional[int] = ..., num_migrations: _Optional[int] = ..., num_migrated_bytes: _Optional[int] = ..., failed_migrations: _Optional[_Mapping[str, int]] = ...) -> None: ...

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

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[ListedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[ListedWorker, _Mapping]]] = ...) -> None: ...

class ListedWorker(_message.Message):
    __slots__ = ("name", "role", "address", "incarnation", "state", "num_requests", "num_prompt_tokens", "max_context_tokens", "num_blocks", "max_num_sequences")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    address: str
    incarnation: str
    state: WorkerState
    num_requests: int
    num_prompt_tokens: int
    max_context_tokens: int
    num_blocks: int
    max_num_sequences: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_sequences: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ListedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ListedRequest, _Mapping]]] = ...) -> None: ...

class ListedRequest(_message.Message):
    __slots__ = ("request_id", "state", "age_s", "remaining_s", "num_prompt_tokens", "num_output_tokens", "prefill_worker", "decode_worker", "num_attempts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    age_s: float
    remaining_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefill_worker: str
    decode_worker: str
    num_attempts: int
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., age_s: _Optional[float] = ..., remaining_s: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., num_attempts: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("completion", "age_s", "findings")
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    completion: _inference_pb2.Completion
    age_s: float
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, completion: _Optional[_Union[_inference_pb2.Completion, _Mapping]] = ..., age_s: _Optional[float] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("phase", "symptom", "seconds", "usual_s", "evidence", "advice")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SYMPTOM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    USUAL_S_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    symptom: Symptom
    seconds: float
    usual_s: float
    evidence: str
    advice: str
    def __init__(self, phase: _Optional[str] = ..., symptom: _Optional[_Union[Symptom, str]] = ..., seconds: _Optional[float] = ..., usual_s: _Optional[float] = ..., evidence: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("timeline",)
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    timeline: _timeline_pb2.Timeline
    def __init__(self, timeline: _Optional[_Union[_timeline_pb2.Timeline, _Mapping]] = ...) -> None: ...

class ListTimelinesRequest(_message.Message):
    __slots__ = ("window_s",)
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    def __init__(self, window_s: _Optional[float] = ...) -> None: ...

class ListWorkerStepsRequest(_message.Message):
    __slots__ = ("window_s",)
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    def __init__(self, window_s: _Optional[float] = ...) -> None: ...

class WorkerSteps(_message.Message):
    __slots__ = ("worker", "steps")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    steps: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Step]
    def __init__(self, worker: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[_timeline_pb2.Step, _Mapping]]] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("window_s",)
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    def __init__(self, window_s: _Optional[float] = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("num_requests", "troubles", "phases")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    phases: _containers.RepeatedCompositeFieldContainer[PhaseSpread]
    def __init__(self, num_requests: _Optional[int] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., phases: _Optional[_Iterable[_Union[PhaseSpread, _Mapping]]] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("num_requests", "seconds", "worst_request_id", "worst")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORST_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    seconds: float
    worst_request_id: str
    worst: Finding
    def __init__(self, num_requests: _Optional[int] = ..., seconds: _Optional[float] = ..., worst_request_id: _Optional[str] = ..., worst: _Optional[_Union[Finding, _Mapping]] = ...) -> None: ...

class PhaseSpread(_message.Message):
    __slots__ = ("phase", "p50_s", "p95_s", "max_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P95_S_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    p50_s: float
    p95_s: float
    max_s: float
    def __init__(self, phase: _Optional[str] = ..., p50_s: _Optional[float] = ..., p95_s: _Optional[float] = ..., max_s: _Optional[float] = ...) -> None: ...

class NoteScalingRequest(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

class NoteScalingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReconfigureRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: RouterPolicy
    def __init__(self, policy: _Optional[_Union[RouterPolicy, _Mapping]] = ...) -> None: ...

class ReconfigureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterPolicy(_message.Message):
    __slots__ = ("on_failure", "max_attempts", "max_wait_s", "max_queued_requests", "max_queue_s", "local_prefill", "local_prefill_tokens")
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    on_failure: str
    max_attempts: int
    max_wait_s: float
    max_queued_requests: int
    max_queue_s: float
    local_prefill: str
    local_prefill_tokens: int
    def __init__(self, on_failure: _Optional[str] = ..., max_attempts: _Optional[int] = ..., max_wait_s: _Optional[float] = ..., max_queued_requests: _Optional[int] = ..., max_queue_s: _Optional[float] = ..., local_prefill: _Optional[str] = ..., local_prefill_tokens: _Optional[int] = ...) -> None: ...
