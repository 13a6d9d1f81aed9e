"""The example files are configurations, and the README names only what there is."""

import re
from pathlib import Path

import pytest

from core.config import ClusterConfig, load_config

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
PACKAGES = "bench|core|decode_worker|deploy|engine|kv_link|kv_transfer|prefill_worker|proto|router"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_is_a_valid_configuration(path: Path):
    assert isinstance(load_config(path), ClusterConfig)


def test_the_laptop_example_is_the_defaults_written_out():
    example = load_config(ROOT / "deploy" / "examples" / "laptop.yaml")

    assert example.model_copy(update={"prefill": None}) == ClusterConfig()
    assert example.prefill_pool == ClusterConfig().prefill_pool


def test_every_file_and_module_that_the_readme_names_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    modules = re.findall(rf"`((?:{PACKAGES})/[\w/]+)`", README)

    missing = [link for link in links if not (ROOT / link).exists()]
    missing += [m for m in modules if not (ROOT / f"{m}.py").is_file() and not (ROOT / m).is_dir()]
    assert missing == []
    assert len(links) >= 8 and len(modules) >= 30


def test_every_make_target_that_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`?make ([a-z-]+)", README)) - {"are"}

    assert {target for target in named if f"\n{target}:" not in makefile} == set()


def test_the_python_examples_of_the_readme_use_names_that_exist():
    import twophase.client

    block, *others = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    for example in (block, *others):
        compile(example, "README.md", "exec")
    names = re.search(r"from twophase.client import (.*)", block)
    assert names is not None
    assert [n for n in names[1].split(", ") if not hasattr(twophase.client, n)] == []


def test_every_package_of_the_house_is_in_the_readme():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    house = README[README.index("## The house") : README.index("## Measure it")]

    assert packages >= {"core", "kv_link", "router"}
    assert {name for name in packages if name not in house} == set()
