"""Rule files and scrape configuration for Prometheus, as text. Pure functions of the alerts and some settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtop.errors import UserError
from kvtop.monitoring.alerts import ALERTS, RECORDINGS, Alert

ALERT_NAMES: Final = tuple(alert.name for alert in ALERTS)


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """What can be chosen about the rules.

    Attributes:
        window: Over which rates and averages are taken; at least four scrapes long.
        long_window: Over which the usual hit ratio is taken.
        interval: How often the rules are evaluated; empty leaves it to Prometheus.
        hold: How long every alert holds before it fires; ``None`` leaves each its own.
        holds: The same for single alerts, by name.
        thresholds: Numbers of single alerts, by name.
        job: Name of the scrape job.
        runbooks: Where the runbook pages lie: a path, or an address.
    """

    window: str = "5m"
    long_window: str = "1h"
    interval: str = ""
    hold: str | None = None
    holds: Mapping[str, str] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    job: str = "kvtop"
    runbooks: str = "docs/runbooks"


def rules_text(settings: RuleSettings) -> str:
    """Return the rule file.

    Raises:
        UserError: A name is no alert's, or an alert without a number was given one.
    """
    _check_names(settings)
    return "\n".join(_rules(settings)) + "\n"


def _rules(settings: RuleSettings) -> Iterator[str]:
    yield "# Made by: kvtop export rules. Holds, thresholds and windows are its options."
    yield "groups:"
    for group in ("recordings", "alerts"):
        yield f"  - name: kvtop-{group}"
        if settings.interval:
            yield f"    interval: {settings.interval}"
        yield "    rules:"
        if group == "recordings":
            for recording in RECORDINGS:
                yield f"      - record: {recording.record}"
                yield from _block("        expr", fill(recording.expr, settings))
        else:
            for alert in ALERTS:
                yield from _alert(alert, settings)


def _alert(alert: Alert, settings: RuleSettings) -> Iterator[str]:
    threshold = settings.thresholds.get(alert.name, alert.threshold)
    yield f"      - alert: {alert.name}"
    yield from _block("        expr", fill(alert.expr, settings, threshold))
    yield f"        for: {hold_of(alert, settings)}"
    yield "        labels:"
    yield f"          severity: {alert.severity}"
    yield "        annotations:"
    yield f"          summary: {_quoted(alert.summary)}"
    yield f"          description: {_quoted(alert.description)}"
    yield f"          runbook_url: {_quoted(runbook_url(alert, settings))}"


def hold_of(alert: Alert, settings: RuleSettings) -> str:
    """Return how long an alert's expression must hold; one that fires at once does so unless it is named."""
    common = None if alert.hold == "0s" else settings.hold
    return settings.holds.get(alert.name, common or alert.hold)


def runbook_url(alert: Alert, settings: RuleSettings) -> str:
    """Return where an alert's runbook page is."""
    return f"{settings.runbooks.rstrip('/')}/{alert.page}.md"


def scrape_config_text(
    targets: Sequence[str],
    *,
    job: str = "kvtop",
    interval: str = "15s",
    rules: Sequence[str] = (),
    alertmanagers: Sequence[str] = (),
) -> str:
    """Return a configuration with which Prometheus scrapes kvtop.

    Args:
        targets: ``HOST:PORT`` of each exporter.
        job: Name of the scrape job; the rules look for it.
        interval: Between two scrapes, and between two evaluations of the rules.
        rules: Rule files.
        alertmanagers: ``HOST:PORT`` of each Alertmanager.
    """
    return "\n".join(_config(targets, job, interval, rules, alertmanagers)) + "\n"


def _config(
    targets: Sequence[str], job: str, interval: str, rules: Sequence[str], alertmanagers: Sequence[str]
) -> Iterator[str]:
    yield "# Made by: kvtop export prometheus-config."
    yield "global:"
    yield f"  scrape_interval: {interval}"
    yield f"  evaluation_interval: {interval}"
    if rules:
        yield "rule_files:"
        yield from (f"  - {_quoted(path)}" for path in rules)
    if alertmanagers:
        yield "alerting:"
        yield "  alertmanagers:"
        yield "    - static_configs:"
        yield f"        - targets: {json.dumps(list(alertmanagers))}"
    yield "scrape_configs:"
    yield f"  - job_name: {_quoted(job)}"
    yield "    # An exporter with --metrics-tls-cert and --metrics-auth also needs:"
    yield "    # scheme: https"
    yield "    # tls_config: {ca_file: /path/to/cert.pem}"
    yield "    # basic_auth: {username: prometheus, password_file: /path/to/password}"
    yield "    static_configs:"
    yield f"      - targets: {json.dumps(list(targets))}"


def fill(expr: str, settings: RuleSettings, threshold: float | None = None) -> str:
    """Return an expression of ``alerts`` with its words in angle brackets filled in."""
    words = {"<window>": settings.window, "<long>": settings.long_window, "<job>": settings.job}
    if threshold is not None:
        words["<threshold>"] = f"{threshold:g}"
    for word, meaning in words.items():
        expr = expr.replace(word, meaning)
    return expr


def _check_names(settings: RuleSettings) -> None:
    without = {alert.name for alert in ALERTS if alert.threshold is None}
    for option, names in (("--for", settings.holds), ("--threshold", settings.thresholds)):
        for name in names:
            if name not in ALERT_NAMES:
                raise UserError(f"{option} {name}: no such alert; one of {', '.join(ALERT_NAMES)}")
            if option == "--threshold" and name in without:
                raise UserError(f"{option} {name}: this alert has no threshold")


def _block(key: str, text: str) -> Iterator[str]:
    lines = text.split("\n")
    if len(lines) == 1:
        yield f"{key}: {_quoted(text)}"
        return
    yield f"{key}: |-"
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    yield from (indent + line for line in lines)


def _quoted(text: str) -> str:
    """Return a YAML string; JSON's are."""
    return json.dumps(text, ensure_ascii=False)
