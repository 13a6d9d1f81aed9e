"""Writes docs/metrics.md: the metric table between its two marks, the rest as it stands."""

from pathlib import Path

from core.telemetry import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
BEGIN, END = "<!-- table: written by `make docs` -->\n", "<!-- end of table -->\n"


def written() -> str:
    """The page with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
