"""Grafana's JSON of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from .panels import ROWS, Panel, Row

FILE: Final = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "kvpool.json"
SCHEMA_VERSION: Final = 39
"""Of Grafana 11, which later versions read."""
GRID_WIDTH: Final = 24
_HEIGHT: Final = 8
_STAT_HEIGHT: Final = 5
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def document() -> str:
    """The file, as Grafana imports it."""
    dashboard = {
        "uid": "kvpool",
        "title": "kvpool",
        "description": "A cluster of kvpool: manager, workers, gateway. Written by `make docs` from scripts/dashboard.",
        "tags": ["kvpool", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                _datasource_variable(),
                _variable("worker", "Workers", "kvpool_manager_worker_info", "worker"),
                _variable("instance", "Workers' pages", "kvpool_worker_info", "instance"),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels(ROWS)),
    }
    return _text(dashboard) + "\n"


def _text(dashboard: dict[str, Any]) -> str:
    """JSON with a line for each panel and each other field: a change of one panel is a change of one line."""
    panels = ",\n    ".join(json.dumps(panel, ensure_ascii=False) for panel in dashboard["panels"])
    fields = [
        f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in dashboard.items() if key != "panels"
    ]
    return "{\n  " + ",\n  ".join([*fields, f'"panels": [\n    {panels}\n  ]']) + "\n}"


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, three panels in a line; stats share a line with what comes next in the row."""
    ids, y = count(1), 0
    for row in rows:
        grid = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        yield {"id": next(ids), "type": "row", "title": row.title, "collapsed": False, "gridPos": grid, "panels": []}
        y += 1
        for line in _lines(row.panels):
            height = _STAT_HEIGHT if line[0].kind == "stat" else _HEIGHT
            width = GRID_WIDTH // len(line)
            for index, panel in enumerate(line):
                left = index * width
                grid = {"x": left, "y": y, "w": GRID_WIDTH - left if panel is line[-1] else width, "h": height}
                yield _panel(next(ids), panel, grid)
            y += height


def _lines(panels: Sequence[Panel]) -> Iterator[Sequence[Panel]]:
    stats = [panel for panel in panels if panel.kind == "stat"]
    rest = [panel for panel in panels if panel.kind != "stat"]
    if stats:
        yield stats
    for first in range(0, len(rest), 3):
        yield rest[first : first + 3]


def _panel(number: int, panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if is_stat else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
    }
    if not is_stat:
        defaults["min"] = 0
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.bad_from is None else "dashed"},
        }
    if is_stat:
        options: dict[str, Any] = {
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
                "instant": False,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.bad_from is not None:
        return [{"color": "green", "value": None}, {"color": "red", "value": panel.bad_from}]
    if panel.bad_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    return [{"color": "green", "value": None}]


def _datasource_variable() -> dict[str, Any]:
    """The viewer chooses among the Prometheus data sources; with one there is nothing to choose."""
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _variable(name: str, label: str, metric: str, of_label: str) -> dict[str, Any]:
    """Values of a label, all of them chosen at first."""
    query = f"label_values({metric}, {of_label})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }
