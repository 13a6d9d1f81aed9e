from twophase.v1 import inference_pb2 as _inference_pb2
from twophase.v1 import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("name", "role", "incarnation", "model", "layout", "num_blocks", "max_context_tokens", "vocab_size", "max_num_sequences", "kernels", "clock_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: str
    model: str
    layout: Layout
    num_blocks: int
    max_context_tokens: int
    vocab_size: int
    max_num_sequences: int
    kernels: str
    clock_s: float
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_num_sequences: _Optional[int] = ..., kernels: _Optional[str] = ..., clock_s: _Optional[float] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("weights_hash", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size", "protocol_version")
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    weights_hash: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int
    protocol_version: int
    def __init__(self, weights_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "role", "address", "pid", "num_total_blocks", "num_free_blocks", "num_cached_blocks", "num_used_blocks", "num_quarantined_blocks", "num_waiting_requests", "num_running_requests", "num_reservations", "num_open_transfers", "num_handler_tasks", "num_steps", "num_transfer_bytes", "links", "num_waiting_prompt_tokens", "kernels", "quarantine_age_s", "num_runnable_requests", "is_draining", "signals", "clock_s", "samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDLER_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNABLE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    address: str
    pid: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int
    num_waiting_requests: int
    num_running_requests: int
    num_reservations: int
    num_open_transfers: int
    num_handler_tasks: int
    num_steps: int
    num_transfer_bytes: int
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    num_waiting_prompt_tokens: int
    kernels: str
    quarantine_age_s: float
    num_runnable_requests: int
    is_draining: bool
    signals: Signals
    clock_s: float
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_waiting_requests: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_open_transfers: _Optional[int] = ..., num_handler_tasks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_transfer_bytes: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., num_waiting_prompt_tokens: _Optional[int] = ..., kernels: _Optional[str] = ..., quarantine_age_s: _Optional[float] = ..., num_runnable_requests: _Optional[int] = ..., is_draining: _Optional[bool] = ..., signals: _Optional[_Union[Signals, _Mapping]] = ..., clock_s: _Optional[float] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("metric", "labels", "value", "counts")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    metric: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    value: float
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, metric: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., value: _Optional[float] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Signals(_message.Message):
    __slots__ = ("queue_wait_p50_s", "queue_wait_p95_s", "oldest_wait_s", "num_parked", "tokens_per_s", "num_in_flight_bytes", "bytes_per_s", "max_bytes_per_s", "transfer_wait_s", "step_s")
    QUEUE_WAIT_P50_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_P95_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    queue_wait_p50_s: float
    queue_wait_p95_s: float
    oldest_wait_s: float
    num_parked: int
    tokens_per_s: float
    num_in_flight_bytes: int
    bytes_per_s: float
    max_bytes_per_s: float
    transfer_wait_s: float
    step_s: float
    def __init__(self, queue_wait_p50_s: _Optional[float] = ..., queue_wait_p95_s: _Optional[float] = ..., oldest_wait_s: _Optional[float] = ..., num_parked: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., num_in_flight_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., max_bytes_per_s: _Optional[float] = ..., transfer_wait_s: _Optional[float] = ..., step_s: _Optional[float] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("worker", "request_id", "state", "num_blocks", "epoch", "age_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    request_id: str
    state: str
    num_blocks: int
    epoch: int
    age_s: float
    def __init__(self, worker: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks: _Optional[int] = ..., epoch: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer", "backend", "reason", "num_bytes", "latency_s", "bytes_per_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    backend: str
    reason: str
    num_bytes: int
    latency_s: float
    bytes_per_s: float
    def __init__(self, peer: _Optional[str] = ..., backend: _Optional[str] = ..., reason: _Optional[str] = ..., num_bytes: _Optional[int] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class WireRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "remaining_s", "num_resumed_tokens", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: WireSampling
    remaining_s: float
    num_resumed_tokens: int
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[WireSampling, _Mapping]] = ..., remaining_s: _Optional[float] = ..., num_resumed_tokens: _Optional[int] = ..., trace_id: _Optional[str] = ...) -> None: ...

class WireSampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "min_tokens", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "num_logprobs", "grammar", "num_prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_inference_pb2.LogitBias]
    num_logprobs: int
    grammar: str
    num_prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_inference_pb2.LogitBias, _Mapping]]] = ..., num_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class WireReservation(_message.Message):
    __slots__ = ("decode_worker", "decode_address", "decode_incarnation", "epoch", "block_ids", "num_shared_blocks", "num_shared_tokens", "prompt_digest")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    decode_address: str
    decode_incarnation: str
    epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_shared_blocks: int
    num_shared_tokens: int
    prompt_digest: int
    def __init__(self, decode_worker: _Optional[str] = ..., decode_address: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_shared_blocks: _Optional[int] = ..., num_shared_tokens: _Optional[int] = ..., prompt_digest: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "reservation")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    request: WireRequest
    reservation: WireReservation
    def __init__(self, request: _Optional[_Union[WireRequest, _Mapping]] = ..., reservation: _Optional[_Union[WireReservation, _Mapping]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request", "reservation", "held_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    HELD_ID_FIELD_NUMBER: _ClassVar[int]
    request: WireRequest
    reservation: WireReservation
    held_id: str
    def __init__(self, request: _Optional[_Union[WireRequest, _Mapping]] = ..., reservation: _Optional[_Union[WireReservation, _Mapping]] = ..., held_id: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "transfer_done", "prompt_logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    transfer_done: TransferDone
    prompt_logprobs: PromptLogprobs
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., transfer_done: _Optional[_Union[TransferDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    def __init__(self, request_id: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "times", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    times: PrefillTimes
    logprobs: _inference_pb2.Logprobs
    def __init__(self, token_id: _Optional[int] = ..., times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., logprobs: _Optional[_Union[_inference_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "num_cached_tokens", "num_chunks", "events")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    num_chunks: int
    events: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Event]
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., events: _Optional[_Iterable[_Union[_timeline_pb2.Event, _Mapping]]] = ...) -> None: ...

class TransferDone(_message.Message):
    __slots__ = ("backend", "num_bytes", "num_pieces", "push_s", "exposed_s", "events")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    PUSH_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    backend: str
    num_bytes: int
    num_pieces: int
    push_s: float
    exposed_s: float
    events: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Event]
    def __init__(self, backend: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_pieces: _Optional[int] = ..., push_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., events: _Optional[_Iterable[_Union[_timeline_pb2.Event, _Mapping]]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("reserve", "cancel", "hold")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    reserve: Reserve
    cancel: WireCancel
    hold: WireHold
    def __init__(self, reserve: _Optional[_Union[Reserve, _Mapping]] = ..., cancel: _Optional[_Union[WireCancel, _Mapping]] = ..., hold: _Optional[_Union[WireHold, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request", "prefill_locally")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    request: WireRequest
    prefill_locally: bool
    def __init__(self, request: _Optional[_Union[WireRequest, _Mapping]] = ..., prefill_locally: _Optional[bool] = ...) -> None: ...

class WireCancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class WireHold(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DecodeUpdate(_message.Message):
    __slots__ = ("reserved", "tokens", "failed", "is_draining", "prompt_logprobs", "held")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    reserved: _containers.RepeatedCompositeFieldContainer[Reserved]
    tokens: _containers.RepeatedCompositeFieldContainer[NewToken]
    failed: _containers.RepeatedCompositeFieldContainer[RequestFailed]
    is_draining: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    held: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, reserved: _Optional[_Iterable[_Union[Reserved, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[NewToken, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[RequestFailed, _Mapping]]] = ..., is_draining: _Optional[bool] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ListStepsRequest(_message.Message):
    __slots__ = ("window_s",)
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    def __init__(self, window_s: _Optional[float] = ...) -> None: ...

class ListStepsResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Step]
    def __init__(self, steps: _Optional[_Iterable[_Union[_timeline_pb2.Step, _Mapping]]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "reservation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reservation: WireReservation
    def __init__(self, request_id: _Optional[str] = ..., reservation: _Optional[_Union[WireReservation, _Mapping]] = ...) -> None: ...

class NewToken(_message.Message):
    __slots__ = ("request_id", "token_id", "index", "done", "prefill_times", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_id: int
    index: int
    done: DecodeDone
    prefill_times: PrefillTimes
    logprobs: _inference_pb2.Logprobs
    def __init__(self, request_id: _Optional[str] = ..., token_id: _Optional[int] = ..., index: _Optional[int] = ..., done: _Optional[_Union[DecodeDone, _Mapping]] = ..., prefill_times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., logprobs: _Optional[_Union[_inference_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class DecodeDone(_message.Message):
    __slots__ = ("finish_reason", "report", "events")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    report: _inference_pb2.DecodeReport
    events: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Event]
    def __init__(self, finish_reason: _Optional[str] = ..., report: _Optional[_Union[_inference_pb2.DecodeReport, _Mapping]] = ..., events: _Optional[_Iterable[_Union[_timeline_pb2.Event, _Mapping]]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: WireError
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[WireError, _Mapping]] = ...) -> None: ...

class WireError(_message.Message):
    __slots__ = ("kind", "message", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LinkUp(_message.Message):
    __slots__ = ("open", "piece", "seal", "abort", "abort_ack", "begin")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    open: OpenLink
    piece: PieceHeader
    seal: Seal
    abort: AbortTransfer
    abort_ack: AbortAck
    begin: BeginTransfer
    def __init__(self, open: _Optional[_Union[OpenLink, _Mapping]] = ..., piece: _Optional[_Union[PieceHeader, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., abort: _Optional[_Union[AbortTransfer, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., begin: _Optional[_Union[BeginTransfer, _Mapping]] = ...) -> None: ...

class LinkDown(_message.Message):
    __slots__ = ("opened", "piece_ack", "sealed", "refused", "abort", "abort_ack", "link_refused", "granted")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PIECE_ACK_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    LINK_REFUSED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    opened: LinkOpened
    piece_ack: PieceAck
    sealed: Sealed
    refused: TransferRefused
    abort: AbortTransfer
    abort_ack: AbortAck
    link_refused: WireError
    granted: TransferGranted
    def __init__(self, opened: _Optional[_Union[LinkOpened, _Mapping]] = ..., piece_ack: _Optional[_Union[PieceAck, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., refused: _Optional[_Union[TransferRefused, _Mapping]] = ..., abort: _Optional[_Union[AbortTransfer, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., link_refused: _Optional[_Union[WireError, _Mapping]] = ..., granted: _Optional[_Union[TransferGranted, _Mapping]] = ...) -> None: ...

class BeginTransfer(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class TransferGranted(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenLink(_message.Message):
    __slots__ = ("prefill_worker", "incarnation", "decode_incarnation", "layout", "backend", "host_id", "device", "has_nixl", "has_rdma", "card", "reachable_cards")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HAS_NIXL_FIELD_NUMBER: _ClassVar[int]
    HAS_RDMA_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_CARDS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    incarnation: str
    decode_incarnation: str
    layout: Layout
    backend: str
    host_id: str
    device: str
    has_nixl: bool
    has_rdma: bool
    card: str
    reachable_cards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefill_worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., backend: _Optional[str] = ..., host_id: _Optional[str] = ..., device: _Optional[str] = ..., has_nixl: _Optional[bool] = ..., has_rdma: _Optional[bool] = ..., card: _Optional[str] = ..., reachable_cards: _Optional[_Iterable[str]] = ...) -> None: ...

class LinkOpened(_message.Message):
    __slots__ = ("kind", "reason", "parameters", "layout", "num_blocks")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    parameters: _containers.ScalarMap[str, str]
    layout: Layout
    num_blocks: int
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PieceHeader(_message.Message):
    __slots__ = ("request_id", "epoch", "index", "first_layer", "num_layers", "first_block", "num_blocks", "num_bytes", "checksum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    index: int
    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int
    num_bytes: int
    checksum: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("request_id", "epoch", "num_pieces", "first_token_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    num_pieces: int
    first_token_id: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_pieces: _Optional[int] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class PieceAck(_message.Message):
    __slots__ = ("request_id", "epoch", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    index: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class TransferRefused(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reason: str
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class AbortTransfer(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reason: str
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
