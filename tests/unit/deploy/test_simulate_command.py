"""`twophase simulate`, as it is typed."""

from pathlib import Path

from typer.testing import CliRunner

from core.errors import ConfigError
from deploy.cli import app

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "deploy" / "examples" / "scaling.yaml")
TRACE = str(ROOT / "tests" / "data" / "traces" / "azure_code_head.csv")


def test_a_trace_is_played_and_every_decision_told_in_words():
    words = ["simulate", "--config", EXAMPLE, "--trace", TRACE, "--requests", "300"]
    result = CliRunner().invoke(app, [*words, "--rate", "0.1"])
    assert result.exit_code == 0, result.output
    assert "first token" in result.output
    assert "prefill 2 -> 3 (" in result.output


def test_what_a_router_recorded_is_played_under_two_configurations_side_by_side(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("prefill: {replicas: 1}\ndecode: {replicas: 1}\n")
    words = ["what-if", "--recorded", TRACE, "--config", EXAMPLE, "--against", str(other)]
    result = CliRunner().invoke(app, [*words, "--rate", "0.1"])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if "most workers" in line)
    assert "1 prefill, 1 decode" in line
    assert line.count("prefill") == 2


def test_a_figure_that_cannot_be_drawn_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.simulate.report.find_spec", lambda name: None)
    words = ["simulate", "--config", EXAMPLE, "--figure", str(tmp_path / "run.png")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert ("pip install matplotlib" in str(result.exception), result.output) == (True, "")


def test_faults_are_told_with_the_run_and_a_mistake_in_one_is_refused():
    words = ["simulate", "--config", EXAMPLE, "--requests", "200", "--fault"]
    result = CliRunner().invoke(app, [*words, "lost:decode@60"])
    assert result.exit_code == 0, result.output
    assert "workers lost, requests resumed" in result.output
    refused = CliRunner().invoke(app, [*words, "lost:router@60"])
    assert refused.exit_code != 0
