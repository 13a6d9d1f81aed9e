"""No product module can unpickle: what comes from a network is protobuf, JSON, bytes or numbers.

Ray pickles for its own actors (`deploy`), as docs/security.md tells; nothing else does.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "core",
    "engine",
    "kv_transfer",
    "kv_link",
    "prefill_worker",
    "decode_worker",
    "router",
    "deploy",
)
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
LOADS = {"torch.load", "yaml.load", "numpy.load", "np.load"}
# The collectives of torch.distributed that carry Python objects.
OBJECTS = ("_object", "_object_list")
FILES = [path for name in (*PACKAGES, "proto/twophase") for path in (ROOT / name).rglob("*.py")]


def unpickling(source: str) -> list[str]:
    """Imports and calls by which the code could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "this package")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if name in LOADS or name.endswith(OBJECTS):
                found.append(f"pickle by {name}")
    return [name for name in found if name.partition(".")[0].split()[0] in MODULES]


def test_no_module_can_unpickle():
    found = {str(path): unpickling(path.read_text(encoding="utf-8")) for path in FILES}

    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "torch.load(file)",
        "yaml.load(text)",
        "distributed.broadcast_object_list(values)",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert unpickling(source) != []
