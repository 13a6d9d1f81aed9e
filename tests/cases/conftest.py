"""Clusters in this process, and the answers of one plain process to compare theirs with."""

import pytest

from core.layout import Dtype
from engine.runner import Runner
from tests.cases.one_process import one_process
from tests.contract.kinds import NIXL
from tests.engine_loop import generate
from tests.tiny_model import write_tiny_model

BACKENDS = ["memory", "shm", "torch", NIXL]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The tiny model of four layers."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory):
    """As many layers as SmolLM2-135M."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "deep", num_layers=30)


@pytest.fixture
def run(model):
    """`async with run(backend, *overrides) as cluster`."""
    return lambda backend, *overrides: one_process(model, backend, *overrides)


class Reference:
    """What one plain process answers; each prompt alone, so that nothing can be mixed up."""

    def __init__(self, directory):
        self.runner = Runner(
            directory, dtype=Dtype.FLOAT32, block_size=16, kv_cache_bytes=32 << 20, num_threads=1
        )
        self._answers = {}

    def __call__(self, prompt, max_tokens, sampling=None):
        key = (tuple(prompt), max_tokens, sampling)
        if key not in self._answers:
            (self._answers[key],) = generate(
                self.runner, [list(prompt)], max_tokens=max_tokens, sampling=sampling
            )
        return self._answers[key]


@pytest.fixture(scope="session")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="session")
def deep_reference(deep_model):
    return Reference(deep_model)
