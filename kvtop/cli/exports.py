"""``kvtop export``: what is shipped for Prometheus and Grafana, and a configuration file."""

from __future__ import annotations

import click

from kvtop.cli.values import DURATION, HOLD, HOST_PORT, LABEL, THRESHOLD, WORD
from kvtop.errors import EXIT_OK


@click.group("export", no_args_is_help=False)
def export_group() -> None:
    """Print what is shipped for Prometheus and Grafana, or a configuration file."""


@export_group.command("rules")
@click.option(
    "--for",
    "holds",
    type=HOLD,
    metavar="[ALERT=]D",
    multiple=True,
    help="How long an alert must hold before it fires: of one, or of all that do not fire at once; repeatable.",
)
@click.option(
    "--threshold",
    "thresholds",
    type=THRESHOLD,
    metavar="ALERT=X",
    multiple=True,
    help="An alert's number; repeatable.",
)
@click.option("--window", type=DURATION, metavar="D", default="5m", help="Of rates and averages (5m).")
@click.option("--long-window", type=DURATION, metavar="D", default="1h", help="Of the usual hit ratio (1h).")
@click.option("--interval", type=DURATION, metavar="D", help="Between two evaluations (Prometheus's own).")
@click.option("--job", type=LABEL, metavar="NAME", default="kvtop", help="Name of the scrape job (kvtop).")
@click.option(
    "--runbooks", type=WORD, metavar="URL", default="docs/runbooks", help="Where the runbooks lie (docs/runbooks)."
)
def export_rules(
    holds: tuple[tuple[str | None, str], ...],
    thresholds: tuple[tuple[str, float], ...],
    window: str,
    long_window: str,
    interval: str | None,
    job: str,
    runbooks: str,
) -> int:
    """Print recording rules and alerts, a rule file for Prometheus.

    D is a duration such as 90s, 5m or 1h30m. The window must span at least four scrapes.
    """
    from kvtop.headless import write_out
    from kvtop.monitoring.rules import RuleSettings, rules_text

    settings = RuleSettings(
        window=window,
        long_window=long_window,
        interval=interval or "",
        hold=next((hold for name, hold in reversed(holds) if name is None), None),
        holds={name: hold for name, hold in holds if name is not None},
        thresholds=dict(thresholds),
        job=job,
        runbooks=runbooks,
    )
    write_out(rules_text(settings).rstrip("\n"))
    return EXIT_OK


@export_group.command("config")
def export_config() -> int:
    """Print a configuration file, kvtop.toml, with every key of the console as it is at first.

    Every line is a remark; drop the # of what is to be otherwise.
    """
    from kvtop.headless import write_out
    from kvtop.tui.settings import example_text

    write_out(example_text().rstrip("\n"))
    return EXIT_OK


@export_group.command("dashboard")
def export_dashboard() -> int:
    """Print a dashboard for Grafana, to be imported there."""
    from kvtop.headless import write_out
    from kvtop.monitoring.dashboard import dashboard_text

    write_out(dashboard_text().rstrip("\n"))
    return EXIT_OK


@export_group.command("prometheus-config")
@click.option(
    "--target", "targets", type=HOST_PORT, metavar="HOST:PORT", multiple=True, help="An exporter (127.0.0.1:9464)."
)
@click.option("--rules", type=WORD, metavar="FILE", multiple=True, help="A rule file; repeatable (kvtop-rules.yml).")
@click.option("--alertmanager", type=HOST_PORT, metavar="HOST:PORT", multiple=True, help="Where alerts go; repeatable.")
@click.option("--interval", type=DURATION, metavar="D", default="15s", help="Between two scrapes (15s).")
@click.option("--job", type=LABEL, metavar="NAME", default="kvtop", help="Name of the scrape job (kvtop).")
def export_prometheus_config(
    targets: tuple[str, ...], rules: tuple[str, ...], alertmanager: tuple[str, ...], interval: str, job: str
) -> int:
    """Print a configuration with which Prometheus scrapes kvtop and evaluates its rules."""
    from kvtop.headless import write_out
    from kvtop.monitoring.rules import scrape_config_text

    text = scrape_config_text(
        targets or ("127.0.0.1:9464",),
        job=job,
        interval=interval,
        rules=rules or ("kvtop-rules.yml",),
        alertmanagers=alertmanager,
    )
    write_out(text.rstrip("\n"))
    return EXIT_OK
