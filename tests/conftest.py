"""Fixtures that every kind of test shares."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, fetched once per machine."""
    from deploy.model_store import fetch_model

    return fetch_model("smollm2-135m-instruct")
