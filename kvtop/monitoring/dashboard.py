"""The Grafana dashboard, as JSON, laid out from the table of panels. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

from kvtop.monitoring.panels import ROWS, Panel

#: Grafana's grid: columns of a row, and the heights of a title, a number and a graph.
_COLUMNS: Final = 24
_TITLE_HEIGHT, _STAT_HEIGHT, _GRAPH_HEIGHT = 1, 4, 8
_GRAPHS_A_LINE: Final = 3
#: Of Grafana 10; later ones migrate it when it is opened.
_SCHEMA_VERSION: Final = 38
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_text() -> str:
    """Return the dashboard's JSON."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "kvtop",
        "title": "kvtop: paged KV caches",
        "description": "Made by: kvtop export dashboard.",
        "tags": ["kvtop", "kv-cache"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "timezone": "",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _source_variable()]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
    }


def _source_variable() -> dict[str, Any]:
    query = "label_values(kvtop_source_up, source)"
    return {
        "name": "source",
        "label": "Source",
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "source"},
        "current": {"text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "sort": 1,
    }


def _panels() -> Iterator[dict[str, Any]]:
    numbers, y = count(1), 0
    for row in ROWS:
        yield {
            "id": next(numbers),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": _TITLE_HEIGHT},
            "panels": [],
        }
        y += _TITLE_HEIGHT
        is_stat = row.panels[0].kind == "stat"
        height = _STAT_HEIGHT if is_stat else _GRAPH_HEIGHT
        a_line = len(row.panels) if is_stat else min(_GRAPHS_A_LINE, len(row.panels))
        width = _COLUMNS // a_line
        for place, panel in enumerate(row.panels):
            line, column = divmod(place, a_line)
            position = {"x": column * width, "y": y + line * height, "w": width, "h": height}
            yield _panel(panel, next(numbers), position)
        y += -(-len(row.panels) // a_line) * height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.is_ratio:
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 60 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "colorMode": "value" if panel.red_from is None else "background",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": panel.kind == "timeseries",
                "instant": panel.kind == "stat",
            }
            for place, query in enumerate(panel.queries)
        ],
    }
