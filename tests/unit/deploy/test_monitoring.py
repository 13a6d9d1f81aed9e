"""Rules, alerts and the board ask for metrics that there are, by labels that these have."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from core.telemetry import TABLE, Kind
from deploy.grafana.board import BOARD
from deploy.grafana.panel import WIDTH, board_to_json

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULE_TESTS = ROOT / "tests" / "data" / "prometheus" / "alerts_test.yaml"
# What Prometheus itself adds.
OWN_LABELS = {"instance", "job", "le"}
METRIC = re.compile(r"\b(?:twophase[a-z0-9_:]*|up\b)(?=[\s({\[)]|$)")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def read(name):
    return yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))


def rules(name):
    return [rule for group in read(name)["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yaml")}
RECORDED = {rule["record"]: rule["expr"] for rule in rules("rules.yaml")}
QUERIES = [
    *RECORDED.values(),
    *(rule["expr"] for rule in ALERTS.values()),
    *(query.expr for row in BOARD for panel in row.panels for query in panel.queries),
]


def labels_by_series():
    """Of every series that can be asked for by name, its labels."""
    found = {"up": set()}
    for entry in TABLE:
        suffixes = ("_bucket", "_sum", "_count") if entry.kind is Kind.HISTOGRAM else ("",)
        found |= {entry.name + suffix: set(entry.labels) for suffix in suffixes}
    for name, expr in RECORDED.items():
        found[name] = set().union(*(found[metric] for metric in METRIC.findall(expr)))
    return found


LABELS = labels_by_series()


def unknown(expr):
    """Metrics and labels of an expression that nothing has."""
    metrics = METRIC.findall(expr)
    assert metrics
    known = OWN_LABELS.union(*(LABELS.get(metric, ()) for metric in metrics))
    named = [label for group in GROUPING.findall(expr) for label in group.split(",")]
    asked = {*MATCHER.findall(expr), *(label.strip() for label in named)} - {""}
    return {metric for metric in metrics if metric not in LABELS} | (asked - known)


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_asks_for_what_there_is(expr):
    assert unknown(expr) == set()


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ("rate(twophase_no_such_total[5m])", {"twophase_no_such_total"}),
        ("twophase_phase_seconds", {"twophase_phase_seconds"}),  # a histogram has no such series
        ('sum by (phase) (twophase_workers{pull="decode"})', {"phase", "pull"}),
        ("twophase:no_rule:rate5m / twophase_ready", {"twophase:no_rule:rate5m"}),
    ],
)
def test_what_there_is_not_would_be_found(expr, wrong):
    assert unknown(expr) == wrong


def test_bounds_of_objectives_are_buckets():
    bounds = {
        (metric, float(bound))
        for expr in RECORDED.values()
        for metric, bound in re.findall(r'(\w+)_bucket\{le="([0-9.]+)"\}', expr)
    }
    buckets = {entry.name: entry.buckets for entry in TABLE}
    assert len(bounds) == 2 and all(bound in buckets[metric] for metric, bound in bounds)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_look_at_first_and_has_a_chapter(name):
    alert = ALERTS[name]
    notes = alert["annotations"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert notes["summary"].endswith(".") and "irst see" in notes["description"]
    page, _, anchor = notes["runbook_url"].partition("#")
    headings = re.findall(r"^### (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    asked = set(METRIC.findall(alert["expr"]))
    templated = set(re.findall(r"\$labels\.(\w+)", str(notes)))
    assert templated <= OWN_LABELS.union(*(LABELS[metric] for metric in asked))


def test_the_scrape_configuration_loads_both_files_for_the_job_that_they_ask_for():
    config = read("prometheus.yaml")
    assert sorted(config["rule_files"]) == ["alerts.yaml", "rules.yaml"]
    [scrape] = config["scrape_configs"]
    jobs = {job for rule in ALERTS.values() for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == {scrape["job_name"]}
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_each_alert_is_made_to_fire():
    told = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))
    fired = {
        name
        for test in told["tests"]
        for fact in test["promql_expr_test"]
        for sample in fact["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == set(ALERTS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", PROMETHEUS / "prometheus.yaml"), ("test", "rules", RULE_TESTS)],
    ids=["syntax", "rules"],
)
def test_promtool_agrees(arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_are_numbered_lie_beside_each_other_and_ask_the_chosen_source():
    board = board_to_json(BOARD)
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < WIDTH
    [variable] = board["templating"]["list"]
    assert variable["name"] == "datasource"
    for panel in panels:
        if panel["type"] != "row":
            assert panel["type"] in ("timeseries", "stat")
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]


def test_legends_name_labels_that_their_query_leaves():
    for row in BOARD:
        for panel in row.panels:
            for query in panel.queries:
                labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
                kept = re.search(r"sum by \(([^)]*)\)", query.expr)
                metrics = METRIC.findall(query.expr)
                left = (
                    set(kept[1].replace(" ", "").split(","))
                    if kept
                    else set().union(*(LABELS[metric] for metric in metrics))
                )
                assert labels <= left, (panel.title, query.expr)


def test_the_page_tells_of_every_row():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for row in BOARD:
        assert f"| {row.title.partition(':')[0]}" in page
