"""A Hugging Face id -> the files of that model that twophase reads.

Only safetensors weights, JSON, tokenizer files and chat templates are taken, from the top folder
alone. The list of files with their sizes is asked for first, so that a download that was broken
off is never mistaken for a whole one. Blocks; an interrupted download goes on where it stopped.
"""

import shutil
from pathlib import Path

import httpx2  # what huggingface_hub speaks HTTP with
import huggingface_hub
from huggingface_hub.errors import (
    DryRunError,
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import DryRunFileInfo
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.progress import Progress

from core.errors import ModelError
from core.model_path import is_model_directory
from deploy.wheel_download import show_growth

_TAKEN = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_LEFT = ["*/*", "consolidated*", "*.bin", "*.pth"]


def download_snapshot(name: str, directory: Path, *, progress: Progress) -> None:
    """Fill `directory` with the newest snapshot of the model `name` (org/name).

    Raises:
        ModelError: no such model, no access, no connection, or a model without safetensors or
            tokenizer.json.
    """
    disable_progress_bars()
    try:
        files = _list_files(name, directory)
        task = progress.add_task("download", total=sum(file.file_size or 0 for file in files))
        with show_growth(directory, progress=progress, task=task):
            huggingface_hub.snapshot_download(
                name,
                revision=files[0].commit_hash if files else None,
                local_dir=directory,
                allow_patterns=_TAKEN,
                ignore_patterns=_LEFT,
            )
    except (DryRunError, EntryNotFoundError, HFValidationError, httpx2.HTTPError, OSError) as error:
        raise ModelError(_reason(name, error)) from error
    _require_whole(name, directory, files)
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def _list_files(name: str, directory: Path) -> list[DryRunFileInfo]:
    listed = huggingface_hub.snapshot_download(
        name, local_dir=directory, allow_patterns=_TAKEN, ignore_patterns=_LEFT, dry_run=True
    )
    assert isinstance(listed, list)
    return listed


def _require_whole(name: str, directory: Path, files: list[DryRunFileInfo]) -> None:
    for file in files:
        path = directory / file.filename
        if not path.is_file() or file.file_size not in (None, path.stat().st_size):
            raise ModelError(f"{name}: {file.filename} did not arrive whole, try again")
    if not is_model_directory(directory):
        raise ModelError(f"{name} lacks config.json, tokenizer.json or *.safetensors")


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, DryRunError) and error.__cause__ is not None:
        return _reason(name, error.__cause__)
    match error:
        case GatedRepoError():
            return f"{name} needs its licence accepted on huggingface.co, then `hf auth login`"
        case RepositoryNotFoundError() | HFValidationError():
            return f"huggingface.co has no model {name}, or it needs `hf auth login`"
        case _:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return (
                f"{name} cannot be downloaded: connect to huggingface.co and try again, or name "
                f"a local model directory instead ({lines[0]})"
            )
