"""Where fetched models lie, and how a name becomes a directory.

Workers call `find_model` only: it reads the file system and never the network. Fetching is the
business of `deploy.model_store`, which publishes a directory here by one rename, so that what
`find_model` sees is always whole.
"""

import re
from pathlib import Path

import platformdirs

from core.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def cache_directory() -> Path:
    """The user's cache directory of twophase; it need not exist yet."""
    return platformdirs.user_cache_path("twophase")


def model_directory(name: str) -> Path:
    """Where the model `name` lies once fetched: `org/name` becomes the one folder `org--name`.

    Raises:
        ModelError: `name` is neither a plain name nor `org/name`.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(f"{name!r} is neither a model name, a Hugging Face id nor a directory")
    return cache_directory() / "models" / name.replace("/", "--")


def is_model_directory(path: Path) -> bool:
    """Whether `path` holds configuration, tokenizer and weights in Hugging Face format."""
    return (
        (path / "config.json").is_file()
        and (path / "tokenizer.json").is_file()
        and any(path.glob("*.safetensors"))
    )


def find_model(name_or_path: str) -> Path:
    """The directory of a model that is already on this machine, in Hugging Face format.

    A local directory wins over a fetched model of the same name. Side-effect free.

    Raises:
        ModelError: it is not here; the message says what to run, or what the directory lacks.
    """
    path = Path(name_or_path).expanduser()
    if is_model_directory(path):
        return path.resolve()
    if path.is_dir() and not _NAME.fullmatch(name_or_path):
        raise ModelError(
            f"{path} is no model directory: it needs config.json, tokenizer.json and *.safetensors"
        )
    directory = model_directory(name_or_path)
    if is_model_directory(directory):
        return directory
    raise ModelError(
        f"model {name_or_path} is not on this machine: run `twophase model fetch {name_or_path}`"
    )
