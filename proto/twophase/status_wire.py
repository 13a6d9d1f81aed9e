"""Messages that tell what a worker holds, to core types and back."""

from collections.abc import Iterator

from core import telemetry
from core.request import RequestId, WorkerName
from core.telemetry import Sample
from core.worker import BlockHolder, KvTotals, LinkStatus, Role, StuckWorker, WorkerStatus
from twophase.signals_wire import signals_from_wire, signals_to_wire
from twophase.v1 import admin_pb2
from twophase.v1 import worker_pb2 as pb

_ENTRIES = {entry.name: entry for entry in telemetry.TABLE}


def status_to_wire(status: WorkerStatus, clock_s: float = 0.0) -> pb.WorkerStatus:
    """What a worker holds, as a message; clock_s is its clock as it answers, 0 if others tell."""
    return pb.WorkerStatus(
        name=status.name,
        role=status.role.value,
        address=status.address,
        pid=status.pid,
        num_total_blocks=status.num_total_blocks,
        num_free_blocks=status.num_free_blocks,
        num_cached_blocks=status.num_cached_blocks,
        num_used_blocks=status.num_used_blocks,
        num_quarantined_blocks=status.num_quarantined_blocks,
        num_waiting_requests=status.num_waiting_requests,
        num_running_requests=status.num_running_requests,
        num_reservations=status.num_reservations,
        num_open_transfers=status.num_open_transfers,
        num_handler_tasks=status.num_handler_tasks,
        num_steps=status.num_steps,
        num_transfer_bytes=status.num_transfer_bytes,
        num_waiting_prompt_tokens=status.num_waiting_prompt_tokens,
        kernels=status.kernels,
        quarantine_age_s=status.quarantine_age_s,
        num_runnable_requests=status.num_runnable_requests,
        is_draining=status.is_draining,
        signals=signals_to_wire(status.signals),
        samples=map(_sample_to_wire, status.samples),
        clock_s=clock_s,
        links=[
            pb.LinkStatus(
                peer=link.peer,
                backend=link.backend,
                reason=link.reason,
                num_bytes=link.num_bytes,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
            for link in status.links
        ],
    )


def status_from_wire(message: pb.WorkerStatus) -> WorkerStatus:
    """What a worker holds, from its message."""
    return WorkerStatus(
        name=WorkerName(message.name),
        role=Role(message.role),
        address=message.address,
        pid=message.pid,
        num_total_blocks=message.num_total_blocks,
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_used_blocks=message.num_used_blocks,
        num_quarantined_blocks=message.num_quarantined_blocks,
        num_waiting_requests=message.num_waiting_requests,
        num_running_requests=message.num_running_requests,
        num_reservations=message.num_reservations,
        num_open_transfers=message.num_open_transfers,
        num_handler_tasks=message.num_handler_tasks,
        num_steps=message.num_steps,
        num_transfer_bytes=message.num_transfer_bytes,
        num_waiting_prompt_tokens=message.num_waiting_prompt_tokens,
        kernels=message.kernels,
        quarantine_age_s=message.quarantine_age_s,
        num_runnable_requests=message.num_runnable_requests,
        is_draining=message.is_draining,
        signals=signals_from_wire(message.signals),
        samples=tuple(_known_samples(message)),
        links=tuple(
            LinkStatus(
                WorkerName(link.peer),
                link.backend,
                link.reason,
                link.num_bytes,
                link.latency_s if link.HasField("latency_s") else None,
                link.bytes_per_s if link.HasField("bytes_per_s") else None,
            )
            for link in message.links
        ),
    )


def _sample_to_wire(sample: Sample) -> pb.Sample:
    return pb.Sample(
        metric=sample.entry.name, labels=sample.labels, value=sample.value, counts=sample.counts
    )


def _known_samples(message: pb.WorkerStatus) -> Iterator[Sample]:
    """Those of metrics that have the same labels and buckets here: a worker may be older."""
    for sample in message.samples:
        entry = _ENTRIES.get(sample.metric)
        if entry is None or len(sample.labels) != len(entry.labels):
            continue
        if len(sample.counts) == (len(entry.buckets) + 1 if entry.buckets else 0):
            labels, counts = tuple(sample.labels), tuple(sample.counts)
            yield Sample(entry, sample.value, labels, counts)


def holder_to_wire(holder: BlockHolder) -> pb.BlockHolder:
    """Who holds blocks, as a message."""
    return pb.BlockHolder(
        worker=holder.worker,
        request_id=holder.request_id,
        state=holder.state,
        num_blocks=holder.num_blocks,
        epoch=holder.epoch,
        age_s=holder.age_s,
    )


def holder_from_wire(message: pb.BlockHolder) -> BlockHolder:
    """Who holds blocks, from its message."""
    return BlockHolder(
        worker=WorkerName(message.worker),
        request_id=RequestId(message.request_id),
        state=message.state,
        num_blocks=message.num_blocks,
        epoch=message.epoch,
        age_s=message.age_s,
    )


def stuck_to_wire(stuck: StuckWorker) -> admin_pb2.StuckWorker:
    """A worker that was given up, as a message."""
    return admin_pb2.StuckWorker(
        name=stuck.name, address=stuck.address, why=stuck.why, age_s=stuck.age_s
    )


def stuck_from_wire(message: admin_pb2.StuckWorker) -> StuckWorker:
    """A worker that was given up, from its message."""
    return StuckWorker(WorkerName(message.name), message.address, message.why, message.age_s)


def kv_totals_to_wire(totals: KvTotals) -> admin_pb2.KvTotals:
    """How KV caches came to be, as a message."""
    return admin_pb2.KvTotals(
        num_transferred_tokens=totals.num_transferred_tokens,
        num_decode_cached_tokens=totals.num_decode_cached_tokens,
        num_local_prefill_tokens=totals.num_local_prefill_tokens,
        num_sealed_handoffs=totals.num_sealed_handoffs,
        num_failed_handoffs=totals.num_failed_handoffs,
        num_migrations=totals.num_migrations,
        num_migrated_bytes=totals.num_migrated_bytes,
        failed_migrations=dict(totals.failed_migrations),
    )


def kv_totals_from_wire(message: admin_pb2.KvTotals) -> KvTotals:
    """How KV caches came to be, from its message."""
    return KvTotals(
        num_transferred_tokens=message.num_transferred_tokens,
        num_decode_cached_tokens=message.num_decode_cached_tokens,
        num_local_prefill_tokens=message.num_local_prefill_tokens,
        num_sealed_handoffs=message.num_sealed_handoffs,
        num_failed_handoffs=message.num_failed_handoffs,
        num_migrations=message.num_migrations,
        num_migrated_bytes=message.num_migrated_bytes,
        failed_migrations=tuple(sorted(message.failed_migrations.items())),
    )
