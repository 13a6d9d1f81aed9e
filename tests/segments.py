"""Shared memory that nobody maps: what a process that ended has left behind."""

import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 5.0


def assert_no_orphans(known: set[str]) -> None:
    """Within SETTLE_S every segment that is not in `known` is mapped by a living process.

    Other tests may run at the same time: what they use is mapped.
    """
    until_s = time.monotonic() + SETTLE_S
    while orphans := _orphans(known):
        assert time.monotonic() < until_s, f"left in {SHARED_MEMORY}: {sorted(orphans)}"
        time.sleep(0.1)


def segments() -> set[str]:
    """Names of all segments."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _orphans(known: set[str]) -> set[str]:
    new = segments() - known
    return new - _mapped() if new else new


def _mapped() -> set[str]:
    """Names of the segments that some process maps or holds open."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
            held = [str(fd.readlink()) for fd in (maps.parent / "fd").iterdir()]
        except OSError:
            continue  # it has ended meanwhile
        paths = [line.split(maxsplit=5)[-1] for line in lines] + held
        names |= {Path(path).name for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
    return names
