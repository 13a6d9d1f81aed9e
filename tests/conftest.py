"""Fixtures that every kind of test shares."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that test may be busy: how long an input takes to be drawn says nothing about the code.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, fetched once per machine."""
    from deploy.model_store import fetch_model

    return fetch_model("smollm2-135m-instruct")
