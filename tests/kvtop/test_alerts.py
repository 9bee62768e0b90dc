"""Rules as Prometheus reads them: checked by promtool, and each alert fires, stays silent and resolves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from alert_cases import CASES, AlertCase

from kvtop.errors import UserError
from kvtop.exporter import METRICS
from kvtop.gpu_metrics import GPU_METRICS
from kvtop.monitoring.alerts import ALERTS, RECORDINGS
from kvtop.monitoring.rules import RuleSettings, rules_text, scrape_config_text

ROOT = Path(__file__).parents[2]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is missing")
BY_NAME = {alert.name: alert for alert in ALERTS}


def promtool(*args: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yml"
    path.write_text(rules_text(RuleSettings()))
    return path


def unit_tests(case: AlertCase) -> list[dict[str, object]]:
    alert = BY_NAME[case.alert]
    fired = {
        "exp_labels": {**case.base_labels, **case.labels, "severity": case.severity},
        "exp_annotations": {
            "summary": case.summary,
            "description": alert.description,
            "runbook_url": f"docs/runbooks/{alert.page}.md",
        },
    }
    moments = [(case.pending_at, []), (case.fires_at, [fired]), (case.resolved_at, [])]
    tests = [(case.series, moments)]
    tests += [(series, [(minute, []) for minute in range(0, case.silent_until, 2)]) for series in case.silent.values()]
    return [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values.strip()} for name, values in series.items()],
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": expected}
                for minute, expected in moments
            ],
        }
        for series, moments in tests
    ]


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_it_should_stays_silent_and_resolves(case, rules):
    path = rules.with_name("test.yml")
    # JSON is YAML; the rule file is found beside the tests.
    path.write_text(json.dumps({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": unit_tests(case)}))
    assert "SUCCESS" in promtool("test", "rules", path)


@needs_promtool
def test_an_alert_on_an_absent_exporter_fires_when_nothing_was_ever_scraped(rules):
    path = rules.with_name("test.yml")
    alert = BY_NAME["KvtopExporterAbsent"]
    annotations = {
        "summary": "kvtop is not scraped",
        "description": alert.description,
        "runbook_url": "docs/runbooks/exporter-absent.md",
    }
    expected = {"exp_labels": {"job": "kvtop", "severity": "critical"}, "exp_annotations": annotations}
    moment = {"eval_time": "5m", "alertname": alert.name, "exp_alerts": [expected]}
    tests = [{"interval": "1m", "input_series": [], "alert_rule_test": [moment]}]
    path.write_text(json.dumps({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


def test_every_alert_has_its_cases():
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]
    assert all(case.silent for case in CASES)


@needs_promtool
@pytest.mark.parametrize(
    "settings",
    [
        RuleSettings(),
        RuleSettings(
            window="5s",
            long_window="1h30m",
            interval="1s",
            hold="2s",
            holds={"KvtopIntegrityFault": "1s"},
            thresholds={"KvtopCacheNearlyFull": 0.75},
            job="a-b",
            runbooks="https://example.org/kvtop/",
        ),
    ],
    ids=["as shipped", "as in a test"],
)
def test_rules_are_clean(settings, tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(rules_text(settings))
    assert f"{len(ALERTS) + len(RECORDINGS)} rules found" in promtool("check", "rules", "--lint-fatal", path)


def test_settings_reach_the_rules():
    settings = RuleSettings(
        window="7s",
        interval="1s",
        hold="2s",
        holds={"KvtopCacheNearlyFull": "3s"},
        thresholds={"KvtopCacheNearlyFull": 0.75},
        job="j",
        runbooks="https://example.org/kvtop/",
    )
    text = rules_text(settings)
    assert not re.search(r"<(window|long|threshold|job)>", text)
    assert 'expr: "kvtop:cache_usage:avg{tier=\\"device\\"} > 0.75"\n        for: 3s' in text
    assert "[7s]" in text
    assert "5m" not in text
    assert 'up{job=\\"j\\"}' in text
    assert text.count("    interval: 1s\n") == 2
    assert text.count("        for: 2s\n") == len(ALERTS) - 2
    assert text.count("        for: 0s\n") == 1  # an integrity fault fires at once
    assert 'runbook_url: "https://example.org/kvtop/no-progress.md"' in text


def test_a_name_that_is_no_alert_s_is_refused():
    with pytest.raises(UserError, match=r"^--for Nope: no such alert; one of KvtopCacheNearlyFull, "):
        rules_text(RuleSettings(holds={"Nope": "1s"}))
    with pytest.raises(UserError, match=r"^--threshold KvtopNoProgress: this alert has no threshold"):
        rules_text(RuleSettings(thresholds={"KvtopNoProgress": 1}))


def test_expressions_name_only_what_is_exported():
    exported = {f"{spec.name}_total" if spec.kind == "counter" else spec.name for spec in METRICS} | {*GPU_METRICS}
    recorded = {recording.record for recording in RECORDINGS}
    for rule in (*ALERTS, *RECORDINGS):
        for name in re.findall(r"\bkvtop[\w:]*", re.sub(r'"[^"]*"', "", rule.expr)):
            assert name in (recorded if ":" in name else exported), rule


def test_every_alert_has_a_runbook_that_says_what_confirm_and_do():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert pages.pop("README", "").count("](") >= len(ALERTS)
    assert set(pages) == {alert.page for alert in ALERTS}
    for alert in ALERTS:
        text = pages[alert.page]
        assert text.startswith(f"# {alert.name}\n")
        for title in ("## What it means", "## How to confirm in kvtop", "## What to do"):
            assert title in text


@needs_promtool
def test_the_scrape_configuration_is_clean(tmp_path, rules):
    path = tmp_path / "prometheus.yml"
    path.write_text(
        scrape_config_text(
            ["127.0.0.1:9464", "[::1]:9464"], job="j", interval="1s", rules=[rules.name], alertmanagers=["127.0.0.1:1"]
        )
    )
    assert "is valid prometheus config file syntax" in promtool("check", "config", path)
