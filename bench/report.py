"""The one form in which every bench prints its numbers: a table, then one line of JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number, beside the same number of a peer if there is one."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the peer's value; None without a peer."""
        return self.value / self.peer_value if self.peer_value else None


def print_report(
    title: str, rows: Sequence[Row], facts: Mapping[str, object] | None = None
) -> None:
    """Print a table for people and, as the last line, {"rows": [...]} and facts for programs."""
    table = Table("name", "value", "unit", "peer", "peer value", "ratio", title=title)
    for row in rows:
        table.add_row(
            row.name,
            _number(row.value),
            row.unit,
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio),
        )
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)
    records = [{**asdict(row), "ratio": row.ratio} for row in rows]
    console.file.write(json.dumps({"rows": records, **(facts or {})}) + "\n")
    console.file.flush()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
