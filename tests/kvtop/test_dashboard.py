"""The dashboard: what Grafana needs of it, and queries that ask only for what is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from kvtop.exporter import METRICS
from kvtop.gpu_metrics import GPU_METRICS
from kvtop.monitoring.dashboard import dashboard, dashboard_text
from kvtop.monitoring.panels import ROWS

#: Grafana's names of the units that are used.
UNITS = {"none", "percentunit", "s", "bytes", "Bps", "reqps", "watt", "celsius"}
PANELS = dashboard()["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]


def test_it_is_json_that_is_made_the_same_each_time():
    assert json.loads(dashboard_text()) == dashboard()
    assert dashboard_text() == dashboard_text()
    for key, kind in (("uid", str), ("title", str), ("schemaVersion", int), ("panels", list), ("templating", dict)):
        assert isinstance(dashboard()[key], kind)
    assert "id" not in dashboard()  # Grafana gives it one


def test_panels_tile_the_grid_and_have_their_own_ids():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["w"] > 0
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        cells |= own


def test_every_panel_is_complete():
    for panel in PANELS:
        assert panel["type"] in ("row", "timeseries", "stat")
        assert panel["title"]
        if panel["type"] == "row":
            assert (panel["panels"], panel["collapsed"]) == ([], False)
            continue
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["legendFormat"]


def test_the_data_source_and_the_source_are_variables():
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["source"]["query"]["query"] == "label_values(kvtop_source_up, source)"
    for expr in EXPRESSIONS:
        selectors = re.findall(r"\{[^}]*\}", expr)
        assert selectors
        assert all('source=~"$source"' in selector for selector in selectors), expr


def test_every_metric_is_drawn_and_only_those():
    exported = {f"{spec.name}_total" if spec.kind == "counter" else spec.name for spec in METRICS} | {*GPU_METRICS}
    asked = {
        re.sub(r"_(bucket|count|sum)$", "", name) for expr in EXPRESSIONS for name in re.findall(r"kvtop_\w+", expr)
    }
    asked = {name if name in exported else f"{name}_count" for name in asked}
    assert asked <= exported
    # A size that never changes, and what only tests do, need no graph.
    left_out = {"kvtop_block_size_tokens", "kvtop_block_bytes", "kvtop_pool_blocks", "kvtop_injected_faults_total"}
    left_out |= {"kvtop_swap_blocks_total"}  # its bytes are drawn
    assert exported - asked == left_out


def test_legends_use_labels_that_there_are():
    labels = {label for spec in METRICS for label in ("source", *spec.labels)} | {
        "gpu",
        "direction",
        "process",
        "state",
    }
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= labels


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is missing")
def test_promtool_can_read_every_query(tmp_path):
    rules = [
        {"record": f"check:{number}", "expr": expr.replace("$__rate_interval", "1m")}
        for number, expr in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
