"""``kvtop export``: what it prints, and one line for whatever is wrong."""

from __future__ import annotations

import json

import pytest

from kvtop.cli import run
from kvtop.monitoring.dashboard import dashboard_text
from kvtop.monitoring.rules import RuleSettings, rules_text, scrape_config_text


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(["export", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_what_is_shipped_is_printed(capsys):
    assert printed(capsys, "rules") == rules_text(RuleSettings())
    assert printed(capsys, "dashboard") == dashboard_text()
    assert json.loads(printed(capsys, "dashboard"))["uid"] == "kvtop"
    defaults = scrape_config_text(["127.0.0.1:9464"], rules=["kvtop-rules.yml"])
    assert printed(capsys, "prometheus-config") == defaults


def test_options_reach_the_rules(capsys):
    options = "--for 2s --for KvtopNoProgress=1h30m --threshold KvtopCacheNearlyFull=0.5 --window 30s --long-window 2h"
    options += " --interval 5s --job kv --runbooks https://example.org/r"
    assert printed(capsys, "rules", *options.split()) == rules_text(
        RuleSettings(
            window="30s",
            long_window="2h",
            interval="5s",
            hold="2s",
            holds={"KvtopNoProgress": "1h30m"},
            thresholds={"KvtopCacheNearlyFull": 0.5},
            job="kv",
            runbooks="https://example.org/r",
        )
    )


def test_options_reach_the_configuration(capsys):
    options = "--target gpu7:9464 --target [::1]:9 --rules a.yml --alertmanager am:9093 --interval 5s --job kv"
    assert printed(capsys, "prometheus-config", *options.split()) == scrape_config_text(
        ["gpu7:9464", "[::1]:9"], job="kv", interval="5s", rules=["a.yml"], alertmanagers=["am:9093"]
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["rules", "--for", "soon"], "--for soon: a duration such as 30s, 5m or 1h30m, or ALERT=DURATION"),
        (["rules", "--for", "=5m"], "--for =5m: a duration such as 30s, 5m or 1h30m, or ALERT=DURATION"),
        (["rules", "--for", "Nope=5m"], "--for Nope: no such alert; one of KvtopCacheNearlyFull, "),
        (["rules", "--threshold", "0.5"], "--threshold 0.5: ALERT=NUMBER"),
        (["rules", "--threshold", "KvtopCacheNearlyFull=nan"], "--threshold KvtopCacheNearlyFull=nan: ALERT=NUMBER"),
        (["rules", "--threshold", "KvtopNoProgress=1"], "--threshold KvtopNoProgress: this alert has no threshold"),
        (["rules", "--window", "5"], "--window 5: a duration such as 30s, 5m or 1h30m"),
        (["rules", "--window", "1s1m"], "--window 1s1m: a duration such as 30s, 5m or 1h30m"),
        (["rules", "--window", ""], "--window '': a duration such as 30s, 5m or 1h30m"),
        (["rules", "--job", 'a"b'], '--job a"b: letters, digits, and any of _ . : / -'),
        (["prometheus-config", "--target", "gpu7"], "--target gpu7: HOST:PORT"),
        (["prometheus-config", "--target", "gpu7:0"], "--target gpu7:0: HOST:PORT"),
        (["prometheus-config", "--target", "http://gpu7:9"], "--target http://gpu7:9: HOST:PORT"),
        (["nothing"], "no such command 'nothing'"),
    ],
)
def test_what_is_wrong_is_one_line(args, line, capsys):
    assert run(["export", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {line}")
    assert err.count("\n") == 1


def test_config_is_a_file_that_can_be_used(capsys, tmp_path):
    assert run(["export", "config"]) == 0
    text = capsys.readouterr().out
    assert '# compact = "C"' in text
    file = tmp_path / "kvtop.toml"
    file.write_text(text, encoding="utf-8")
    assert run(["run", "--geometry", "none", "--steps", "3", "--config", str(file)]) == 0
