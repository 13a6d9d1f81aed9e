"""`twophase doctor`: every KV block that is held, by whom and since when."""

import time

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.worker import BlockHolder
from deploy.commands.connection import DEFAULT_ADDRESS, Address, connect
from deploy.commands.phase_bar import duration

SECOND_LOOK_S = 0.5

out = Console()


def doctor(address: Address = DEFAULT_ADDRESS) -> None:
    """List every KV block that is held, by whom and since when; exit code 1 if one is an orphan."""
    with connect(address) as client:
        suspects = {_key(holder) for holder, is_orphan in client.audit_blocks() if is_orphan}
        time.sleep(SECOND_LOOK_S)
        audited = [
            # What is being cancelled looks like an orphan for a moment.
            (holder, is_orphan and _key(holder) in suspects)
            for holder, is_orphan in client.audit_blocks()
        ]
        status = client.status()
    table = Table(box=None, show_header=bool(audited))
    for column in ("worker", "request", "state", "blocks", "epoch", "held for", ""):
        table.add_column(column)
    for holder, is_orphan in sorted(audited, key=lambda pair: -pair[0].age_s):
        table.add_row(
            holder.worker,
            escape(holder.request_id),
            holder.state,
            str(holder.num_blocks),
            str(holder.epoch),
            duration(holder.age_s),
            "[red]orphan[/]" if is_orphan else "",
        )
    out.print(table)
    num_orphans = sum(is_orphan for _, is_orphan in audited)
    num_held = sum(worker.num_used_blocks for worker in status.workers)
    num_quarantined = sum(worker.num_quarantined_blocks for worker in status.workers)
    out.print(
        f"{num_held} blocks in use, {num_quarantined} in quarantine, {num_orphans} orphans",
        style="red" if num_orphans else "green",
    )
    for name in status.silent_workers:
        out.print(f"{escape(name)} does not answer: what it holds is not known", style="red")
    if num_orphans or status.silent_workers:
        raise typer.Exit(1)


def _key(holder: BlockHolder) -> tuple[str, str, int]:
    return holder.worker, holder.request_id, holder.epoch
