"""What a board is made of, and how Grafana reads it: panels of its core alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 24, 8
SCHEMA_VERSION = 41
# Whoever imports the board chooses which.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
DATASOURCE_CHOICE = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
}

Json = dict[str, Any]  # Any: what Grafana reads as JSON


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; legend in Grafana's form, {{label}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    unit is Grafana's; is_stacked adds its series up; is_stat shows one number large.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    note: str = ""
    is_stacked: bool = False
    is_stat: bool = False

    def to_json(self) -> Json:
        """All but its number and place."""
        targets = [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or self.title,
            }
            for index, query in enumerate(self.queries)
        ]
        lines = {
            "fillOpacity": 30 if self.is_stacked else 0,
            "stacking": {"mode": "normal" if self.is_stacked else "none", "group": "A"},
            "showPoints": "never",
        }
        legend = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
        defaults = {"unit": self.unit, "min": 0, "custom": {} if self.is_stat else lines}
        return {
            "type": "stat" if self.is_stat else "timeseries",
            "title": self.title,
            "description": self.note,
            "datasource": DATASOURCE,
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if self.is_stat else legend,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """The question that its panels answer."""

    title: str
    panels: tuple[Panel, ...]


def board_to_json(rows: Sequence[Row]) -> Json:
    """The board as Grafana imports it: rows below each other, three or four panels beside."""
    panels: list[Json] = []
    top = 0
    for row in rows:
        title = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        panels.append({**title, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})
        num_beside = 3 if len(row.panels) % 3 == 0 else 4
        width = WIDTH // num_beside
        for index, panel in enumerate(row.panels):
            line, place = divmod(index, num_beside)
            y = top + 1 + line * HEIGHT
            at = {"x": place * width, "y": y, "w": width, "h": HEIGHT}
            panels.append({**panel.to_json(), "gridPos": at})
        top = panels[-1]["gridPos"]["y"] + HEIGHT
    return {
        "uid": "twophase",
        "title": "twophase",
        "description": "Rows in the order of questions: docs/monitoring.md.",
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "tags": ["twophase"],
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [DATASOURCE_CHOICE]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }
