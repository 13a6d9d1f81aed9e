"""The file that `scaling.log` names: one line of JSON for each decision and each reload.

A line has the time of day beside `now_s`, which is that of no calendar: it is the scaler's clock.

One writer, the scaler's thread; any number of readers. At `scaling.log_size` the file becomes
FILE.1, in place of an older one, and another begins, so that both together stay within twice that.
"""

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

Entry = dict[str, Any]  # Any: as Record.to_json and Reload.to_json make them


def append(path: Path, entry: Entry, max_bytes: int) -> None:
    """Add `entry` with the time of day, in another file if this one is full.

    Raises:
        OSError: it cannot be written.
    """
    try:
        is_full = path.stat().st_size >= max_bytes
    except FileNotFoundError:
        is_full = False
    if is_full:
        path.replace(path.with_name(f"{path.name}.1"))
    at = datetime.now().astimezone().isoformat(timespec="seconds")
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps({"at": at, **entry}) + "\n")


def entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Every entry of the file with its number, from 1.

    Raises:
        OSError, ValueError: it cannot be read, or is no such file.
    """
    with path.open(encoding="utf-8") as log:
        for number, line in enumerate(log, start=1):
            yield number, json.loads(line)


def follow(path: Path, pause: Callable[[], object]) -> Iterator[tuple[int, Entry]]:
    """Every entry, then each that is added, in whatever file it comes; never ends.

    Args:
        path: the file; it exists.
        pause: called whenever there is nothing more; returns when to look again.
    """
    while True:
        with path.open(encoding="utf-8") as log:
            number, line = 0, ""
            is_current = True
            while is_current:
                # Asked before the last look: nothing is added to a file that was put aside.
                is_current = _is_same(path, log.fileno())
                while part := log.readline():
                    line += part
                    if line.endswith("\n"):
                        number += 1
                        yield number, json.loads(line)
                        line = ""
                if is_current:
                    pause()


def _is_same(path: Path, opened: int) -> bool:
    """Whether the path still leads to the file that is open, or to none just now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return True
