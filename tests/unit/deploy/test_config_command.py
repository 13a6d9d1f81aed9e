"""`twophase config`, as it is typed."""

import json

from typer.testing import CliRunner

from deploy.cli import app


def run(*words):
    return CliRunner().invoke(app, ["config", *words])


def test_a_good_file_has_nothing_wrong(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("decode: {replicas: 2}\n")
    result = run("check", str(path))
    assert (result.exit_code, result.output) == (0, f"{path}: nothing is wrong\n")


def test_each_problem_is_told_by_line_with_a_suggestion(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("decode:\n  replica: 2\nmodes: chunked\n")
    result = run("check", str(path))
    assert result.exit_code == 2
    assert result.output == (
        f"{path}:2: decode.replica: is not a known key; did you mean 'replicas'?\n"
        f"{path}:3: modes: is not a known key; did you mean 'mode'?\n"
    )


def test_a_file_that_cannot_be_read_is_a_problem_without_a_line(tmp_path):
    result = run("check", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "cannot be read" in result.output


def test_the_schema_is_json():
    schema = json.loads(run("schema").output)
    assert schema["title"] == "ClusterConfig"
    assert schema["additionalProperties"] is False
