"""Some seconds of what `make chaos` does for ten minutes: streams complete, and nothing is left."""

from pathlib import Path

import pytest

from core.config import load_config
from core.settings.chaos import FaultKind
from deploy.chaos.run import run_chaos

SETUP = (
    *("router.port=0", "router.http_port=null", "prefill.replicas=2", "decode.replicas=2"),
    *("prefill.max_batch_tokens=64", "prefill.kv_cache=4MiB", "decode.kv_cache=16MiB"),
    *("engine.max_context_tokens=1024", "router.worker_timeout_s=1", "router.max_attempts=100"),
    *("router.max_wait_s=60", "chaos.enabled=true", "chaos.duration_s=4", "chaos.every_s=0.5"),
    *("chaos.pause_s=1.5", "chaos.max_tokens=150", "chaos.lost_pieces=0.05"),
    "chaos.faults=[kill,pause,memory]",
)


@pytest.mark.case("B-049")
@pytest.mark.timeout(120)
def test_no_stream_is_lost_or_changed_while_workers_are_killed_and_paused(
    tiny_model_directory: Path,
) -> None:
    said: list[str] = []
    config = load_config(None, [f"model={tiny_model_directory}", *SETUP])
    outcome = run_chaos(config, said.append)

    wrong = [stream for stream in outcome.streams if not outcome.is_right(stream)]
    assert wrong == []
    assert (outcome.left, outcome.leaked) == ({}, ())
    assert outcome.is_clean
    assert {stream.number for stream in outcome.streams} == set(range(8))
    assert {fault.kind for fault in outcome.faults} == set(FaultKind), said
    assert any(stream.failures for stream in outcome.streams)
