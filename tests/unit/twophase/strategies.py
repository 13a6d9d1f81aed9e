"""Random values of every type that crosses the wire, within what the types allow."""

import dataclasses

from hypothesis import strategies as st

from core import errors, link
from core.completion import ChatMessage, Chunk, Completion
from core.errors import TransferFailure
from core.events.clock_offset import WorkerClock
from core.events.event import Event, EventKind
from core.events.step import StepFacts
from core.events.timeline import Timeline
from core.finding import Finding, PhaseSpread, Symptom, Trouble
from core.layout import Dtype, KVLayout
from core.listing import ListedRequest, ListedWorker, WorkerState
from core.request import (
    FinishReason,
    Logprobs,
    Request,
    RequestId,
    SamplingParams,
    Sender,
    Usage,
    WorkerName,
)
from core.request_state import RequestState
from core.sampling import Constraint, ConstraintKind, Sampling
from core.signals import Demand, Moments, Signals
from core.telemetry import TABLE, Sample
from core.timeline import DecodeReport, Gap, Phases, PrefillReport, TransferReport
from core.worker import (
    BlockHolder,
    CancelRequest,
    DecodeDone,
    DecodeUpdate,
    FirstToken,
    Held,
    HoldRequest,
    KvTotals,
    LinkStatus,
    NewToken,
    PromptLogprobs,
    RemoteReservation,
    RequestFailed,
    Reserve,
    Reserved,
    Role,
    StuckWorker,
    WorkerInfo,
    WorkerStatus,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, 2**32 - 1)
wides = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
maybe_seconds = st.none() | seconds
moments = st.none() | st.builds(Moments, mean=seconds, scv=seconds)
demands = st.builds(
    Demand,
    requests_per_s=seconds,
    arrival_scv=seconds,
    num_prompt_tokens=moments,
    decode_s=moments,
    num_in_line=counts,
    num_line_tokens=wides,
    oldest_in_line_s=seconds,
    idle_s=seconds,
)
ids = st.lists(counts, max_size=6).map(tuple)
request_ids = texts.map(RequestId)
names = texts.map(WorkerName)
reasons = st.sampled_from(TransferFailure)


def fields(cls, /, **strategies):
    """Values of a dataclass; no field may be left to its default."""
    assert set(strategies) == {field.name for field in dataclasses.fields(cls)}
    return st.builds(cls, **strategies)


def without_events(report):
    """As a report is told to clients."""
    return dataclasses.replace(report, events=())


layouts = fields(
    KVLayout,
    weights_hash=texts,
    dtype=st.sampled_from(Dtype),
    block_size=counts,
    num_layers=counts,
    num_kv_heads=counts,
    head_dim=counts,
    tensor_parallel_size=counts,
    protocol_version=counts,
)
penalties = st.floats(-2, 2, width=32)
biases = st.dictionaries(counts, st.floats(-100, 100, width=32), max_size=3).map(
    lambda bias: tuple(bias.items())
)
constraints = st.none() | fields(Constraint, kind=st.sampled_from(ConstraintKind), text=texts)
samplings = fields(
    SamplingParams,
    max_tokens=st.integers(1, 2**32 - 1),
    temperature=st.floats(0, 2, width=32),
    top_k=counts,
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=ids,
    min_tokens=counts,
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0, 10, width=32, exclude_min=True),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=biases,
    num_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | texts,
    num_prompt_logprobs=st.none() | st.integers(0, 20),
)
askings = fields(
    Sampling,
    max_tokens=st.none() | counts,
    temperature=st.none() | st.floats(width=32, allow_nan=False),
    top_k=st.none() | counts,
    top_p=st.none() | st.floats(width=32, allow_nan=False),
    seed=st.none() | wides,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    stop=st.lists(texts, max_size=3).map(tuple),
    min_tokens=st.none() | counts,
    min_p=st.none() | st.floats(width=32, allow_nan=False),
    repetition_penalty=st.none() | st.floats(width=32, allow_nan=False),
    presence_penalty=st.none() | penalties,
    frequency_penalty=st.none() | penalties,
    logit_bias=biases,
    num_logprobs=st.none() | counts,
    constraint=constraints,
    n=st.none() | counts,
    num_prompt_logprobs=st.none() | counts,
)
logprobs = fields(
    Logprobs,
    chosen=st.floats(-100, 0, width=32),
    top=st.lists(st.tuples(counts, st.floats(-100, 0, width=32)), max_size=3).map(tuple),
)
requests = fields(
    Request,
    request_id=request_ids,
    prompt_token_ids=ids,
    sampling=samplings,
    deadline_s=st.floats(-1e6, 1e6),
    num_resumed_tokens=counts,
    sender=st.just(Sender()),
    resumption=st.none(),
    mark=st.just(""),
    trace_id=texts,
)
phases = fields(
    Phases,
    tokenize_s=seconds,
    place_s=seconds,
    recovery_s=seconds,
    reserve_s=seconds,
    queue_s=seconds,
    prefill_s=seconds,
    exposed_transfer_s=seconds,
    slot_wait_s=seconds,
    decode_s=seconds,
    delivery_s=seconds,
    total_s=seconds,
    time_to_first_token_s=seconds,
)
events = fields(
    Event,
    kind=st.sampled_from(EventKind),
    begin_s=seconds,
    end_s=seconds,
    where=texts,
    attempt=counts,
    uncertainty_s=seconds,
    index=counts,
    count=counts,
    busy_s=seconds,
    num_tokens=counts,
    num_cached_tokens=counts,
    num_bytes=wides,
    first_layer=counts,
    num_layers=counts,
    num_sequences=counts,
    num_history_tokens=wides,
    request_ids=st.lists(request_ids, max_size=2).map(tuple),
    note=texts,
)
steps = fields(
    StepFacts,
    ended_s=seconds,
    step_s=seconds,
    num_sequences=counts,
    num_history_tokens=wides,
    prompts=st.lists(st.tuples(request_ids, counts), max_size=2).map(tuple),
)
# A worker tells no place and no uncertainty: who hears it knows better.
told_events = st.lists(
    events.map(lambda event: dataclasses.replace(event, where="", uncertainty_s=0.0)), max_size=2
).map(tuple)
prefill_reports = fields(
    PrefillReport,
    queue_s=seconds,
    prefill_s=seconds,
    num_cached_tokens=counts,
    num_chunks=counts,
    events=told_events,
)
decode_reports = fields(
    DecodeReport,
    slot_wait_s=seconds,
    decode_s=seconds,
    step_s=seconds,
    mean_num_sequences=seconds,
    mean_num_history_tokens=seconds,
    prompt_gap_s=seconds,
    longest_gap=st.none()
    | fields(
        Gap,
        index=counts,
        gap_s=seconds,
        step_s=seconds,
        num_sequences=counts,
        num_history_tokens=wides,
        num_prompt_tokens=counts,
        prompts=st.lists(request_ids, max_size=2).map(tuple),
    ),
    events=told_events,
)
findings = fields(
    Finding,
    phase=texts,
    symptom=st.sampled_from(Symptom),
    seconds=seconds,
    usual_s=st.none() | seconds,
    evidence=texts,
    advice=texts,
)
troubles = fields(
    Trouble, num_requests=counts, seconds=seconds, worst_request_id=request_ids, worst=findings
)
phase_spreads = fields(PhaseSpread, phase=texts, p50_s=seconds, p95_s=seconds, max_s=seconds)
transfer_reports = fields(
    TransferReport,
    backend=texts,
    num_bytes=wides,
    num_pieces=counts,
    push_s=seconds,
    exposed_s=seconds,
    events=told_events,
)
completions = fields(
    Completion,
    request_id=request_ids,
    finish_reason=st.sampled_from(FinishReason),
    usage=fields(
        Usage,
        num_prompt_tokens=counts,
        num_output_tokens=counts,
        num_prefill_cached_tokens=counts,
        num_decode_cached_tokens=counts,
        num_transferred_tokens=counts,
        num_local_prefill_tokens=counts,
    ),
    phases=phases,
    transfer=st.none() | transfer_reports.map(without_events),
    prefill_worker=names,
    decode_worker=names,
    placement=texts,
    seed=wides,
    failures=st.lists(texts, max_size=3).map(tuple),
    decode=st.none() | decode_reports.map(without_events),
    num_resumed_tokens=counts,
)
timelines = fields(
    Timeline,
    completion=completions,
    events=st.lists(events, max_size=3).map(tuple),
    is_running=st.booleans(),
    now_s=seconds,
    now_wall_s=seconds,
    clocks=st.lists(
        fields(WorkerClock, worker=names, offset_s=seconds, uncertainty_s=seconds), max_size=2
    ).map(tuple),
)
chunks = fields(
    Chunk,
    text=texts,
    token_ids=ids,
    completion=st.none() | completions,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    seed=st.none() | wides,
    index=counts,
    prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
)
conversations = st.lists(fields(ChatMessage, role=texts, content=texts), max_size=4)

infos = fields(
    WorkerInfo,
    name=names,
    role=st.sampled_from(Role),
    incarnation=texts,
    model=texts,
    layout=layouts,
    num_blocks=counts,
    max_context_tokens=counts,
    vocab_size=counts,
    max_num_sequences=counts,
    kernels=texts,
)


@st.composite
def samples(draw):
    entry = draw(st.sampled_from(TABLE))
    num_counts = len(entry.buckets) + 1 if entry.buckets else 0
    labels = st.tuples(*[texts] * len(entry.labels))
    counted = st.lists(wides, min_size=num_counts, max_size=num_counts).map(tuple)
    return Sample(entry, draw(seconds), draw(labels), draw(counted))


statuses = fields(
    WorkerStatus,
    name=names,
    role=st.sampled_from(Role),
    address=texts,
    pid=counts,
    num_total_blocks=counts,
    num_free_blocks=counts,
    num_cached_blocks=counts,
    num_used_blocks=counts,
    num_quarantined_blocks=counts,
    num_waiting_requests=counts,
    num_running_requests=counts,
    num_reservations=counts,
    num_open_transfers=counts,
    num_handler_tasks=counts,
    num_steps=wides,
    num_transfer_bytes=wides,
    num_waiting_prompt_tokens=wides,
    kernels=texts,
    quarantine_age_s=st.floats(0, 1e9),
    num_runnable_requests=counts,
    is_draining=st.booleans(),
    signals=fields(
        Signals,
        queue_wait_p50_s=maybe_seconds,
        queue_wait_p95_s=maybe_seconds,
        oldest_wait_s=seconds,
        num_parked=counts,
        tokens_per_s=maybe_seconds,
        num_in_flight_bytes=wides,
        bytes_per_s=maybe_seconds,
        max_bytes_per_s=maybe_seconds,
        transfer_wait_s=maybe_seconds,
        step_s=maybe_seconds,
    ),
    links=st.lists(
        fields(
            LinkStatus,
            peer=names,
            backend=texts,
            reason=texts,
            num_bytes=wides,
            latency_s=st.none() | st.floats(0, 1e9),
            bytes_per_s=st.none() | st.floats(0, 1e15),
        ),
        max_size=2,
    ).map(tuple),
    samples=st.lists(samples(), max_size=2).map(tuple),
)
reservations = fields(
    RemoteReservation,
    decode_worker=names,
    decode_address=texts,
    decode_incarnation=texts,
    epoch=wides,
    block_ids=ids,
    num_shared_blocks=counts,
    num_shared_tokens=counts,
    prompt_digest=wides,
)
prompt_logprobs = fields(
    PromptLogprobs,
    request_id=request_ids,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
)
prefill_events = (
    prompt_logprobs
    | fields(FirstToken, token_id=counts, report=prefill_reports, logprobs=st.none() | logprobs)
    | transfer_reports
)
commands = st.one_of(
    fields(Reserve, request=requests, prefill_locally=st.booleans()),
    fields(CancelRequest, request_id=request_ids),
    fields(HoldRequest, request_id=request_ids),
)

all_errors = st.one_of(
    st.builds(errors.TwophaseError, texts),
    st.builds(errors.InvalidRequest, texts, texts | st.integers() | st.floats(), texts),
    st.builds(errors.DuplicateRequest, texts),
    st.builds(errors.PromptTooLong, texts, texts, texts),
    st.builds(errors.Overloaded, texts, retry_after_s=seconds),
    st.builds(errors.DeadlineExceeded, texts),
    st.builds(errors.Cancelled, texts),
    st.builds(errors.PeerLost, texts, texts),
    st.builds(errors.PeerStopping, texts),
    st.builds(errors.TransferFailed, reasons, texts),
    st.builds(errors.LayoutMismatch, texts),
    st.builds(errors.ConfigError, texts, texts, st.none() | texts.filter(bool)),
    st.builds(errors.ModelError, texts),
    st.builds(errors.DeviceLost, texts),
    st.builds(errors.Unauthenticated, texts),
    st.builds(errors.PermissionDenied, texts),
)

updates = fields(
    DecodeUpdate,
    reserved=st.lists(
        fields(Reserved, request_id=request_ids, reservation=reservations), max_size=2
    ).map(tuple),
    tokens=st.lists(
        fields(
            NewToken,
            request_id=request_ids,
            token_id=counts,
            index=counts,
            logprobs=st.none() | logprobs,
            done=st.none()
            | fields(
                DecodeDone,
                finish_reason=st.sampled_from(FinishReason),
                report=decode_reports,
            ),
            prefill=st.none() | prefill_reports,
        ),
        max_size=2,
    ).map(tuple),
    failed=st.lists(
        fields(RequestFailed, request_id=request_ids, error=all_errors), max_size=2
    ).map(tuple),
    is_draining=st.booleans(),
    prompt_logprobs=st.lists(prompt_logprobs, max_size=2).map(tuple),
    held=st.lists(fields(Held, request_id=request_ids), max_size=2).map(tuple),
)
kv_totals = fields(
    KvTotals,
    **{
        name: wides
        for name in (
            "num_transferred_tokens",
            "num_decode_cached_tokens",
            "num_local_prefill_tokens",
            "num_sealed_handoffs",
            "num_failed_handoffs",
            "num_migrations",
            "num_migrated_bytes",
        )
    },
    failed_migrations=st.dictionaries(names, wides).map(lambda d: tuple(sorted(d.items()))),
)

aborts = fields(link.Abort, request_id=request_ids, epoch=wides, reason=reasons, detail=texts)
abort_acks = fields(link.AbortAck, request_id=request_ids, epoch=wides)
ups = st.one_of(
    fields(
        link.OpenLink,
        prefill_worker=names,
        incarnation=texts,
        decode_incarnation=texts,
        layout=layouts,
        backend=texts,
        host_id=texts,
        device=texts,
        has_nixl=st.booleans(),
        has_rdma=st.booleans(),
        card=texts,
        reachable_cards=st.lists(texts, max_size=3).map(tuple),
    ),
    fields(link.Begin, request_id=request_ids, epoch=wides),
    fields(
        link.Piece,
        request_id=request_ids,
        epoch=wides,
        index=counts,
        span=fields(
            link.Span, first_layer=counts, num_layers=counts, first_block=counts, num_blocks=counts
        ),
        num_bytes=wides,
        checksum=wides,
    ),
    fields(
        link.Seal, request_id=request_ids, epoch=wides, num_pieces=counts, first_token_id=counts
    ),
    aborts,
    abort_acks,
)
downs = st.one_of(
    fields(
        link.LinkOpened,
        kind=texts,
        reason=texts,
        parameters=st.dictionaries(texts, texts, max_size=3).map(
            lambda d: tuple(sorted(d.items()))
        ),
        layout=layouts,
        num_blocks=counts,
    ),
    fields(link.LinkRefused, error=all_errors),
    fields(link.Granted, request_id=request_ids, epoch=wides),
    fields(link.PieceAck, request_id=request_ids, epoch=wides, index=counts),
    fields(link.Sealed, request_id=request_ids, epoch=wides),
    fields(link.TransferRefused, request_id=request_ids, epoch=wides, reason=reasons, detail=texts),
    aborts,
    abort_acks,
)
holders = fields(
    BlockHolder,
    worker=names,
    request_id=request_ids,
    state=texts,
    num_blocks=counts,
    epoch=wides,
    age_s=st.floats(0, 1e9),
)
stuck_workers = fields(StuckWorker, name=names, address=texts, why=texts, age_s=st.floats(0, 1e9))

listed_workers = fields(
    ListedWorker,
    name=names,
    role=st.sampled_from(Role),
    address=texts,
    incarnation=texts,
    state=st.sampled_from(WorkerState),
    num_requests=counts,
    num_prompt_tokens=wides,
    max_context_tokens=counts,
    num_blocks=counts,
    max_num_sequences=counts,
)
listed_requests = fields(
    ListedRequest,
    request_id=request_ids,
    state=st.sampled_from(RequestState),
    age_s=seconds,
    remaining_s=st.none() | seconds,
    num_prompt_tokens=counts,
    num_output_tokens=counts,
    prefill_worker=names,
    decode_worker=names,
    num_attempts=counts,
)
