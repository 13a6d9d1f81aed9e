"""`twophase status`: pools, workers, blocks, queues and links, as the router sees them now."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.worker import LinkStatus, Role, WorkerStatus
from deploy.commands.connection import DEFAULT_ADDRESS, Address, connect
from deploy.commands.phase_bar import duration

out = Console()


def status(address: Address = DEFAULT_ADDRESS) -> None:
    """Show pools, workers, blocks, queues and links."""
    with connect(address) as client:
        cluster = client.status()
    ready = "[green]ready[/]" if cluster.is_ready else "[red]not ready[/]"
    out.print(
        f"{escape(cluster.model)}, mode {cluster.mode}, {ready}, "
        f"{cluster.num_active_requests} active requests"
    )
    out.print(_worker_table(cluster.workers))
    for kernels in dict.fromkeys(worker.kernels for worker in cluster.workers):
        names = ", ".join(worker.name for worker in cluster.workers if worker.kernels == kernels)
        out.print(f"{names}: {escape(kernels)}", highlight=False, soft_wrap=True)
    for name in cluster.silent_workers:
        out.print(f"{escape(name)} does not answer", style="red")
    for stuck in cluster.stuck_workers:
        out.print(f"{escape(stuck.name)} was given up: {escape(stuck.why)}", style="red")
    kv = cluster.kv
    out.print(
        f"prompt tokens: {kv.num_transferred_tokens} moved, {kv.num_decode_cached_tokens} cached "
        f"at decode, {kv.num_local_prefill_tokens} computed at decode; handoffs: "
        f"{kv.num_sealed_handoffs} sealed, {kv.num_failed_handoffs} failed"
    )
    if kv.num_migrations or kv.failed_migrations:
        failed = ", ".join(f"{count} failed ({why})" for why, count in kv.failed_migrations)
        out.print(
            f"running answers moved between decode workers: {kv.num_migrations} with "
            f"{kv.num_migrated_bytes / 1e6:.1f} MB of KV cache{', ' * bool(failed)}{failed}"
        )
    for worker in cluster.workers:
        for link in worker.links if worker.role == "prefill" else ():
            out.print(
                f"link {worker.name} to {link.peer}: {link.backend} ({link.reason}), "
                f"{link.num_bytes / 1e6:.1f} MB moved{_speed(link)}"
            )


def _speed(link: LinkStatus) -> str:
    if link.latency_s is None or link.bytes_per_s is None:
        return ""
    return f", {link.bytes_per_s / 1e9:.2f} GB/s, {duration(link.latency_s)} a round trip"


def _quarantine(worker: WorkerStatus) -> str:
    num_blocks = worker.num_quarantined_blocks
    return f"{num_blocks} for {duration(worker.quarantine_age_s)}" if num_blocks else "0"


def _worker_table(workers: tuple[WorkerStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in ("worker", "address"):
        table.add_column(column, overflow="fold")
    for column in ("waiting", "running", "blocks\nused", "quarantined", "cached", "of", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in sorted(workers, key=lambda worker: worker.role is Role.DECODE):
        counts = (
            worker.num_waiting_requests,
            worker.num_running_requests,
            worker.num_used_blocks,
            _quarantine(worker),
            worker.num_cached_blocks,
            worker.num_total_blocks,
            worker.num_steps,
        )
        name = f"{worker.name} (stopping)" if worker.is_draining else worker.name
        table.add_row(name, worker.address, *map(str, counts))
    return table
