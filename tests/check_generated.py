"""Fails when what is generated differs from what is committed: messages, docs, the board."""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

from deploy.grafana import __main__ as board
from tests import metrics_page

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def stale_modules() -> list[str]:
    """Generated files that are missing or differ, relative to proto/."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("twophase/v1/*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = f"={directory}"
        code = protoc.main(
            [
                "protoc",
                f"-I{PROTO}",
                f"--python_out{out}",
                f"--pyi_out{out}",
                f"--grpc_python_out{out}",
                *sources,
            ]
        )
        if code != 0:
            sys.exit(f"protoc failed with code {code}")
        generated = [path for path in Path(directory).rglob("*.py*") if path.is_file()]
        return [
            str(path.relative_to(directory))
            for path in sorted(generated)
            if not (PROTO / path.relative_to(directory)).is_file()
            or not filecmp.cmp(path, PROTO / path.relative_to(directory), shallow=False)
        ]


if __name__ == "__main__":
    stale = stale_modules()
    if stale:
        sys.exit(f"stale, run `make proto`: {', '.join(stale)}")
    if metrics_page.PAGE.read_text(encoding="utf-8") != metrics_page.written():
        sys.exit("docs/metrics.md is stale, run `make docs`")
    if board.FILE.read_text(encoding="utf-8") != board.written():
        sys.exit("deploy/grafana/twophase.json is stale, run `make docs`")
