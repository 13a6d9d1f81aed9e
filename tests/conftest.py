"""Fixtures that every kind of test shares, and how much of the long tests is played.

The suite plays a share of the reference prompts, rounds and pairs that differ in little; with
--thorough (`make test-thorough`) it plays all of them.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Ray reads it when it is imported: its servers then listen on loopback alone (deploy/cli.py).
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Machines that test may be busy: how long an input takes to be drawn says nothing about the code.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

OPTION = "--thorough"


def pytest_addoption(parser: pytest.Parser) -> None:
    """All prompts, rounds and pairs instead of a share of them."""
    parser.addoption(OPTION, action="store_true")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `thorough` unless it was asked for."""
    if config.getoption(OPTION):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether all prompts and rounds are played."""
    return bool(request.config.getoption(OPTION))


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, fetched once per machine."""
    from deploy.model_store import fetch_model

    return fetch_model("smollm2-135m-instruct")
