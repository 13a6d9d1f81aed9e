"""`twophase compare` as people use it, on the tiny model: real clusters, and their report.

Two of the three ways, since each is a cluster to start; with --thorough all three.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.segments import assert_no_orphans, segments

# Starting takes a few seconds where nothing else runs.
TIMEOUT_S = 280.0
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)
WAYS = ("colocated", "chunked", "disaggregated")
SETTINGS = (
    *("engine.dtype=float32", "kv_cache=16MiB", "chunk_tokens=32", "rounds=1"),
    *("requests_per_s=8", "duration_s=1", "max_requests=6"),
    "crossover={input_tokens: [16, 128], streams: 2, quiet_s: 0.05}",
)


@pytest.fixture(scope="module")
def ways(is_thorough) -> tuple[str, ...]:
    return WAYS if is_thorough else WAYS[1:]


@pytest.fixture(scope="module")
def run(
    tiny_model_directory, tmp_path_factory, ways
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command, once; and where its report lies."""
    directory = tmp_path_factory.mktemp("comparison")
    before = segments()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deploy.cli", "compare", "--input", "96", "--output", "8"),
            *(f"model={tiny_model_directory}", f"ways=[{','.join(ways)}]", *SETTINGS),
            *("--out", str(directory)),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert_no_orphans(before)
    return done, directory


def test_all_ways_answer_every_request_with_the_same_tokens(run, ways):
    done, directory = run

    assert done.returncode == 0, done.stdout + done.stderr
    (workload,) = json.loads((directory / "result.json").read_text())["workloads"]
    assert [way["way"] for way in workload["ways"]] == list(ways)
    assert not any(way["num_failed"] for way in workload["ways"])
    num_asked = workload["ways"][0]["num_asked"]
    assert (
        workload["tokens"]["num_equal"] + workload["tokens"]["num_ties"]
        == (len(ways) - 1) * num_asked
    )
    assert workload["tokens"]["differences"] == []


def test_only_one_way_moves_kv_caches(run):
    _, directory = run

    found = json.loads((directory / "result.json").read_text())["workloads"][0]["ways"]
    *others, split = found
    assert all(way["transfer"] is None for way in others)
    assert split["transfer"]["num_moved"] == split["num_asked"]
    # Four layers of 2 x 2 heads of 16 float32 values for each of 96 tokens.
    assert split["transfer"]["num_bytes"] == split["num_asked"] * 96 * 4 * 2 * 2 * 16 * 4


def test_the_report_tells_the_verdict_and_how_it_was_made(run):
    done, directory = run

    text = (directory / "README.md").read_text()
    assert "on this machine" in text and "on this machine" in done.stdout
    assert "**Where disaggregation loses**" in text
    assert "twophase compare --input 96 --output 8" in text
    assert "**Tokens** are the same in all ways" in text
    page = (directory / "report.html").read_text()
    assert page.count("<svg") == 4 and "<script" not in page


def test_the_pictures_show_the_steps_of_every_worker(run, ways):
    _, directory = run

    steps = (directory / "steps-workload.svg").read_text()
    for lane in ("decode-0", "decode-1", "prefill-0", *ways):
        assert f">{lane}</text>" in steps
    # In the span of the picture prompts were read, and tokens made.
    assert "fill:var(--prefill)" in steps.split("decode step", 1)[1]
    assert "fill:var(--decode)" in steps.split("decode step", 1)[1]
    gaps = (directory / "gaps-workload.svg").read_text()
    assert gaps.count('stroke-dasharray="3 3"') >= len(ways)  # long prompts are marked
