"""`twophase simulate`, as it is typed."""

from pathlib import Path

from typer.testing import CliRunner

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
