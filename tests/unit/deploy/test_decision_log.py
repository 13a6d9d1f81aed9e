"""The log of decisions stays small, and whoever follows it misses nothing."""

import itertools
from datetime import datetime, timedelta

from typer.testing import CliRunner

from deploy.cli import app
from deploy.decision_log import append, entries, follow


def entry(number, **more):
    return {"now_s": number, "actions": [], "sentence": f"number {number}", **more}


def numbers(path):
    return [found["now_s"] for _, found in entries(path)]


def test_a_full_log_is_put_aside_and_an_older_one_goes(tmp_path):
    log = tmp_path / "log"
    for number in range(7):
        append(log, entry(number), max_bytes=100)
    assert (numbers(log), numbers(tmp_path / "log.1")) == ([6], [4, 5])
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}


def test_who_follows_the_log_sees_each_entry_once_across_files(tmp_path):
    log = tmp_path / "log"
    coming = itertools.count()

    def add():
        append(log, entry(next(coming)), max_bytes=100)

    add()
    found = list(itertools.islice(follow(log, add), 7))
    assert [seen["now_s"] for _, seen in found] == [0, 1, 2, 3, 4, 5, 6]
    assert [number for number, _ in found] == [1, 2, 1, 2, 1, 2, 1]


def test_a_line_that_is_half_written_is_shown_when_it_is_whole(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"now_s"')
    rest = iter([": 1}", "\n"])

    def pause():
        with log.open("a") as file:
            file.write(next(rest))

    assert next(follow(log, pause)) == (1, {"now_s": 1})


def test_the_command_follows_until_it_is_interrupted(tmp_path, monkeypatch):
    log = tmp_path / "log"
    append(log, entry(1, reload={}), max_bytes=1000)
    added = iter([entry(2), entry(3, actions=[{"Start": {}}])])

    def pause():
        if (new := next(added, None)) is None:
            raise KeyboardInterrupt
        append(log, new, max_bytes=1000)

    monkeypatch.setattr("deploy.commands.scaling._pause", pause)
    shown = CliRunner().invoke(app, ["scaling", "log", "--follow", str(log)])
    lines = [line.split() for line in shown.output.splitlines()]
    assert [line[-1] for line in lines] == ["1", "3"]
    for line in lines:  # the time of day
        age = datetime.now().astimezone() - datetime.fromisoformat(line[1])
        assert timedelta(0) <= age < timedelta(minutes=1)


def test_a_log_of_decisions_that_changed_nothing_says_so(tmp_path):
    log = tmp_path / "decisions.jsonl"
    log.write_text('{"now_s": 1.0, "sentence": "nobody asks", "actions": []}\n' * 2)
    shown = CliRunner().invoke(app, ["scaling", "log", str(log)]).output
    assert shown == "2 decisions, and none changed anything: --all shows them\n"
