"""Writes twophase.json from the board's description: python -m deploy.grafana."""

import json
from pathlib import Path

from deploy.grafana.board import BOARD
from deploy.grafana.panel import board_to_json

FILE = Path(__file__).parent / "twophase.json"


def written() -> str:
    """The file's content of today."""
    return json.dumps(board_to_json(BOARD), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
