"""The shipped rules evaluated here: the same loads that promtool is given, and what is told of each alert."""

from __future__ import annotations

import math
import re

import pytest
from alert_cases import CASES, DEVICE, HOST, UP, AlertCase

from kvtop.monitoring.alerts import ALERTS, RECORDINGS
from kvtop.monitoring.promql import BadExpression, Evaluator, Samples, duration_s, parse
from kvtop.monitoring.rules import RuleSettings, fill
from kvtop.monitoring.watch import AlertStatus, AlertWatch

_SERIES = re.compile(r"([\w:]+)\{(.*)\}")


def series_values(text: str) -> list[float]:
    """Return the values that ``promtool test rules`` reads: ``0x9`` is ten zeros, ``0+5x9`` grows by five."""
    values: list[float] = []
    for word in text.split():
        found = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", word)
        assert found, word
        first, step, times = float(found[1]), float(found[2] or 0), int(found[3] or 0)
        values += [first + step * i for i in range(times + 1)]
    return values


def run(series: dict[str, str], until: int, settings: RuleSettings | None = None) -> list[dict[str, AlertStatus]]:
    """Return every alert at every minute of a load."""
    watch, minutes = AlertWatch(settings), []
    told = {key: series_values(values) for key, values in series.items()}
    for minute in range(until + 1):
        for key, values in told.items():
            name, labels = _SERIES.fullmatch(key).groups()
            if minute < len(values):
                pairs = dict(part.split("=", 1) for part in labels.replace('"', "").split(","))
                watch.sample(60.0 * minute, [(name, pairs, values[minute])])
        minutes.append({status.alert.name: status for status in watch.evaluate(60.0 * minute)})
    return minutes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_here_when_prometheus_says_so(case: AlertCase) -> None:
    minutes = [found[case.alert] for found in run(case.series, case.resolved_at)]
    assert minutes[case.pending_at].state != "firing"
    assert minutes[case.fires_at].state == "firing"
    assert minutes[case.resolved_at].state == "quiet"
    for words, series in case.silent.items():
        states = {found[case.alert].state for found in run(series, case.silent_until)[::2]}
        assert "firing" not in states, words


def test_every_expression_that_is_shipped_is_understood() -> None:
    for rule in (*RECORDINGS, *ALERTS):
        threshold = getattr(rule, "threshold", None)
        parse(fill(rule.expr, RuleSettings(), threshold))


def test_a_firing_alert_says_why_since_when_and_where_its_page_is() -> None:
    case = next(c for c in CASES if c.alert == "KvtopCacheNearlyFull")
    minutes = [found[case.alert] for found in run(case.series, 50)]
    pending, firing = minutes[case.pending_at], minutes[case.fires_at]
    assert (pending.state, firing.hold_s, firing.runbook) == ("pending", 300, "docs/runbooks/cache-nearly-full.md")
    (condition,) = firing.conditions
    assert condition.text == 'kvtop:cache_usage:avg{tier="device"}'
    assert (condition.sign, condition.limit, condition.holds) == (">", 0.9, True)
    assert condition.value == pytest.approx(0.95)
    since = next(i for i, status in enumerate(minutes) if status.state == "pending")
    assert firing.held_s == 60.0 * (case.fires_at - since)


def test_each_condition_of_an_alert_is_told_by_itself() -> None:
    case = next(c for c in CASES if c.alert == "KvtopNoProgress")
    status = run(case.series, 5)[5][case.alert]
    told = [(c.text, c.sign, c.limit, c.holds) for c in status.conditions]
    assert told == [
        ("kvtop:sequences:sum", ">", 0, True),
        ("kvtop:tokens:increase", "==", 0, False),
        ("kvtop_source_up", "==", 1, True),
    ]
    collapsed = next(c for c in CASES if c.alert == "KvtopHitRatioCollapsed")
    status = run(collapsed.series, collapsed.fires_at)[-1][collapsed.alert]
    assert status.conditions[0].limit == pytest.approx(0.5 * status.conditions[1].value)


def test_what_an_engine_does_not_tell_is_unknown_and_not_quiet() -> None:
    status = run({UP: "1x5", DEVICE: "0.5x5"}, 5)[-1]
    assert status["KvtopCacheNearlyFull"].state == "quiet"
    assert status["KvtopSwapSpaceShort"].state == "unknown"
    assert status["KvtopSwapSpaceShort"].missing == 'kvtop_cache_usage_ratio{tier="host"}'
    assert status["KvtopExporterAbsent"].missing == 'up{job="kvtop"}'
    assert status["KvtopIntegrityFault"].state == "unknown"


def test_settings_reach_the_watch() -> None:
    settings = RuleSettings(window="1m", hold="2m", thresholds={"KvtopCacheNearlyFull": 0.4})
    found = [minute["KvtopCacheNearlyFull"] for minute in run({DEVICE: "0.5x5", HOST: "0x5"}, 5, settings)]
    assert [status.state for status in found] == ["pending", "pending", "firing", "firing", "firing", "firing"]


def test_forgetting_begins_anew() -> None:
    watch = AlertWatch(RuleSettings(hold="0s"))
    watch.sample(0.0, [("kvtop_source_up", {"source": "a"}, 0.0)])
    assert next(s for s in watch.evaluate(0.0) if s.alert.name == "KvtopSourceDown").state == "firing"
    watch.forget()
    assert {s.state for s in watch.evaluate(1.0)} == {"unknown"}


def _value(text: str, series: dict[str, list[tuple[float, float]]], now_s: float) -> object:
    samples = Samples(3600.0)
    for key, points in series.items():
        name, labels = _SERIES.fullmatch(key).groups()
        for at_s, value in points:
            samples.add(at_s, name, dict(p.split("=") for p in labels.split(",") if p), value)
    return Evaluator(samples, {}).value(parse(text), now_s)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("7 / 2 - 1", 2.5),
        ("max_over_time(a[2m])", {frozenset({("k", "1")}): 30.0}),
        ("min_over_time(a[2m])", {frozenset({("k", "1")}): 20.0}),
        ("avg_over_time(a[2m])", {frozenset({("k", "1")}): 25.0}),
        ('a{k="2"}', {}),
        ("absent(b)", {frozenset(): 1.0}),
        ("absent(a)", {}),
        ("sum without (k) (a)", {frozenset(): 30.0}),
        ("a > 30", {}),
        ("a >= 30 and a != 31", {frozenset({("k", "1")}): 30.0}),
        ("clamp_min(a, 100)", {frozenset({("k", "1")}): 100.0}),
        ("a or c", {frozenset({("k", "1")}): 30.0, frozenset({("k", "3")}): 1.0}),
    ],
)
def test_expressions_mean_what_prometheus_says(text: str, wanted: object) -> None:
    series = {"a{k=1}": [(0.0, 10.0), (60.0, 20.0), (120.0, 30.0)], "c{k=3}": [(120.0, 1.0)]}
    assert _value(text, series, 120.0) == wanted


def test_counters_that_begin_anew_and_windows_that_are_not_full() -> None:
    only = frozenset({("k", "1")})
    steady = {"a{k=1}": [(60.0 * i, 10.0 * i) for i in range(10)]}
    assert _value("increase(a[5m])", steady, 540.0)[only] == pytest.approx(50.0)
    assert _value("rate(a[5m])", steady, 540.0)[only] == pytest.approx(50.0 / 300)
    again = {"a{k=1}": [(0.0, 90.0), (60.0, 100.0), (120.0, 10.0), (180.0, 20.0)]}
    # Seen: 10, 10 after the reset, 10; drawn out by half an interval at the start.
    assert _value("increase(a[5m])", again, 180.0)[only] == pytest.approx(30.0 * 210 / 180)
    assert _value("rate(a[5m])", {"a{k=1}": [(0.0, 1.0)]}, 0.0) == {}
    assert math.isnan(_value("0 / 0", {}, 0.0))


def test_old_samples_are_dropped_and_no_longer_stand_for_the_present() -> None:
    series = {"a{k=1}": [(0.0, 1.0)]}
    assert _value("a", series, 299.0)
    assert _value("a", series, 300.0) == {}
    samples = Samples(600.0)
    for i in range(10_000):
        samples.add(float(i), "a", {}, 1.0)
    assert len(samples._series["a"][frozenset()]) == 600


@pytest.mark.parametrize(
    "text", ["", "a +", "a b", "sum by (k) (a)", "a[5m", "nope(a[5m])", "rate(a)", "a{k~1}", "$", "1 and 1"]
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        _value(text, {}, 0.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("1h30m", 5400), ("15s", 15), ("500ms", 0.5), ("2d", 172800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


def test_a_word_that_is_no_duration_is_refused() -> None:
    with pytest.raises(BadExpression):
        duration_s("5 minutes")
