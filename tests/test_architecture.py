"""House rules that import-linter and ruff cannot say."""

import ast
import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "core",
    "proto/twophase",
    "engine",
    "kv_transfer",
    "kv_link",
    "prefill_worker",
    "decode_worker",
    "router",
    "deploy",
    "bench",
)
SERVICES = ("service.py", "admin_service.py")
GENERATED = ROOT / "proto" / "twophase" / "v1"
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if GENERATED not in path.parents
)
PROTOS = sorted(GENERATED.glob("*.proto"))

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, both of the module and of what is taken from it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_every_package_of_the_house_is_looked_at():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = {name.split(".")[0] for name in settings["tool"]["setuptools"]["packages"]}
    assert built == {package.rpartition("/")[2] for package in PACKAGES}
    assert len(MODULES) > 60


def test_this_repository_has_no_importable_package_named_proto():
    # proto-plus installs one of that name: ours must not stand in its way.
    assert not (ROOT / "proto" / "__init__.py").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "proto" not in settings["tool"]["setuptools"]["packages"]
    found = importlib.util.find_spec("proto")
    assert found is None or found.origin is None or ROOT not in Path(found.origin).parents


@each_module
def test_generated_messages_are_imported_where_the_wire_is_only(path):
    is_allowed = ROOT / "proto" / "twophase" in path.parents or path.name in SERVICES
    generated = [name for name in imports_of(path) if name.startswith("twophase.v1")]
    if path.name == "server.py":  # adds servicers to its server and knows no message
        generated = [name for name in generated if not name.endswith("_pb2_grpc")]
    assert is_allowed or generated == []


@each_module
def test_nothing_is_printed_and_nothing_left_to_do(path):
    calls = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("print", "breakpoint")
    ]
    assert calls == []
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert [word for word in words if word in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("package", ["engine", "kv_transfer"])
def test_the_engine_and_the_transfer_know_no_event_loop(package):
    users = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if (ROOT / package) in path.parents
        for name in imports_of(path)
        if name.split(".")[0] == "asyncio"
    ]
    assert users == []


@each_module
def test_every_module_says_what_it_owns(path):
    docstring = ast.get_docstring(tree_of(path))
    assert docstring is not None
    assert docstring.splitlines()[0].endswith((".", ":")), "the first line is a sentence"


@pytest.mark.parametrize("path", [*MODULES, *PROTOS], ids=lambda p: str(p.relative_to(ROOT)))
def test_product_code_is_ascii(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if not line.isascii()] == []


@each_module
def test_no_module_is_named_for_nothing(path):
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")


@each_module
def test_decisions_read_no_clock(path):
    # Schedulers, placement and the handoff's machines take now_s; only the edges read a clock.
    pure = {
        "scheduler.py",
        "worker.py",
        "handoff.py",
        "sequence.py",
        "placement.py",
        "admission.py",
        "fairness.py",
        "knowledge.py",
        "ledger.py",
        "prefix_index.py",
        "rates.py",
        "answer.py",
        "inbound.py",
        "outbound.py",
        "plan.py",
    }
    if path.name in pure and path.parent.name not in ("deploy", "core"):
        heads = {name.split(".")[0] for name in imports_of(path)}
        assert not heads & {"time", "datetime", "asyncio", "threading", "grpc", "random"}
