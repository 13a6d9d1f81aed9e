"""Every query of the board and of the rules, asked of a Prometheus that scrapes a live cluster."""

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from deploy.grafana.board import BOARD
from deploy.ports import reserved_address
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import Client, Sampling

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package)"),
]

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
SETUP = ("decode.kv_cache=2MiB", "prefill.kv_cache=2MiB")
# These series begin with an event that a healthy cluster has not: a failed attempt.
NEED_AN_EVENT = {"twophase_attempt_failures_total"}
SCRAPE_S = 1
LOAD_S = 12.0
LIMIT_S = 60.0


class Prometheus:
    """A running server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **asked: str) -> dict:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expr: str) -> list:
        return self.get("query", query=expr)["result"]


@contextmanager
def scraping(target: str, directory: Path) -> Iterator[Prometheus]:
    """The deployed configuration, but for the target and how often."""
    config = yaml.safe_load((DEPLOYED / "prometheus.yaml").read_text(encoding="utf-8"))
    often = f"{SCRAPE_S}s"
    config["global"] = {"scrape_interval": often, "evaluation_interval": often}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    config["rule_files"] = [str(DEPLOYED / name) for name in config["rule_files"]]
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with (
        ExitStack() as held,
        (directory / "prometheus.log").open("w", encoding="utf-8") as log,
    ):
        address = reserved_address(held)
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        server = Prometheus(address)
        try:
            _until(lambda: server.query("up == 1"), OSError)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=20)


def _until(is_true, *not_yet: type[Exception]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            if is_true():
                return
        except not_yet:
            pass
        assert time.monotonic() < until_s, "it did not come to pass"
        time.sleep(0.2)


def _load(client: Client) -> None:
    """Requests of several lengths, until the rates have some past."""
    until_s = time.monotonic() + LOAD_S
    number = 0
    while time.monotonic() < until_s:
        number += 1
        prompt = [3 + (number * 31 + i * 7) % 400 for i in range(20 + number % 3 * 100)]
        client.generate_once(prompt, Sampling(max_tokens=20, ignore_eos=True))


def test_every_query_is_answered(
    tiny_model_directory: Path, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        target = client.status().http_address
        with scraping(target, tmp_path) as prometheus:
            _load(client)
            # 1 the board: each query has an answer now, or is known to need an event
            for panel in (panel for row in BOARD for panel in row.panels):
                for query in panel.queries:
                    expr = query.expr.replace("$__rate_interval", "10s")
                    metrics = set(re.findall(r"twophase_\w+", expr))
                    result = prometheus.query(expr)
                    assert bool(result) != bool(metrics & NEED_AN_EVENT), (panel.title, expr)
                    numbers = [float(sample["value"][1]) for sample in result]
                    assert all(number >= 0 for number in numbers), (panel.title, numbers)
            # 2 the rules: each was evaluated without an error, and recorded something
            groups = prometheus.get("rules")["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"}
            recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
            assert len(recorded) > 10
            for name in recorded:
                assert prometheus.query(name), name
            # 3 nothing is wrong, and nothing says so
            alerts = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
            assert {name for name, state in alerts.items() if state == "firing"} == set()
            # 4 what prometheus added up is what the cluster did
            totals = prometheus.query("sum(twophase_worker_output_tokens_total)")
            assert float(totals[0]["value"][1]) > 0
    asyncio.run(assert_nothing_left(cluster.address))
