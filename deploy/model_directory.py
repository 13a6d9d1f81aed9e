"""Publishing a model directory whole, and telling later whether it still is.

A directory is filled beside its final place, gets a manifest of its files, is flushed to disk and
then renamed: readers see all of it or nothing. The manifest holds size, digest and modification
time of each file; a file whose size and time are unchanged is taken as unchanged, any other is
digested again. Knows nothing of where models come from.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from core.model_path import is_model_directory

MANIFEST_NAME = ".twophase-manifest.json"
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a published directory."""

    name: str
    num_bytes: int
    modified_ns: int
    xxh3_128: str


def publish(staging: Path, directory: Path) -> None:
    """Make `staging` the content of `directory`, whole or not at all.

    Contract: `staging` is gone afterwards, and so is what `directory` held before. The caller
    holds the lock of this model.
    """
    records = [asdict(_record(path)) for path in _files(staging)]
    (staging / MANIFEST_NAME).write_text(json.dumps({"files": records}, indent=2) + "\n")
    for path in [*_files(staging), staging / MANIFEST_NAME, staging]:
        _flush(path)
    if directory.exists():
        shutil.rmtree(directory)
    os.rename(staging, directory)
    _flush(directory.parent)


def is_intact(directory: Path) -> bool:
    """Whether `directory` was published and holds what it held then.

    Reads no weights as long as sizes and modification times are those of the manifest.
    """
    if not is_model_directory(directory):
        return False
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
        records = [FileRecord(**fields) for fields in manifest["files"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
    return all(_is_unchanged(directory / record.name, record) for record in records)


def _is_unchanged(path: Path, record: FileRecord) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if status.st_size != record.num_bytes:
        return False
    return status.st_mtime_ns == record.modified_ns or _digest(path) == record.xxh3_128


def _record(path: Path) -> FileRecord:
    status = path.stat()
    return FileRecord(path.name, status.st_size, status.st_mtime_ns, _digest(path))


def _files(directory: Path) -> Iterator[Path]:
    """Files of a model; it has no folders."""
    return (p for p in sorted(directory.iterdir()) if p.is_file() and p.name != MANIFEST_NAME)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
