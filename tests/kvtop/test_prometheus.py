"""kvtop in an on-call rotation: an engine under pressure, a real Prometheus, a real Alertmanager, a page that comes.

The engine runs in this process; ``Operator`` is the one place that says how it is driven.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_servers import MISSING, Webhook, alertmanager, ask, free_port, prometheus

from allocator.commands import Cancel, Command, Compact, Pause, Resume, SetLoad
from allocator.config import MIN_LOAD_SCALE
from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.exporter import Exporter, start_exporter
from kvtop.metrics_address import MetricsAddress
from kvtop.monitoring.alerts import ALERTS, RECORDINGS
from kvtop.monitoring.panels import ROWS
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: prometheus-alertmanager)"),
    pytest.mark.timeout(240),
]

NEARLY_FULL, FRAGMENTED = "KvtopCacheNearlyFull", "KvtopFragmentationHigh"
#: Seconds until an alert must have reached the webhook: its window, its hold, and the servers' turns, with room.
PAGE_BOUND_S = 60.0
#: Virtual seconds a real second: enough load for the whole test, and no more work than the machine has time for.
SPEED = 4.0


class Operator:
    """Drives the engine through the door that every operator uses."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def do(self, command: Command) -> None:
        outcome = self._attachment.operations.apply(command, 10.0)
        assert outcome.ok, outcome.message

    def compact(self) -> None:
        """Let nothing else happen, and move blocks together."""
        self.do(Pause())
        self.do(Compact())

    def end_load(self) -> None:
        """Let hardly anybody come any more, send away who is there, and go on."""
        self.do(SetLoad(rate_scale=MIN_LOAD_SCALE))
        for row in self._attachment.poll().snapshot.sequences:
            self.do(Cancel(row.seq_id))
        self.do(Resume())


@contextlib.contextmanager
def engine_under_pressure() -> Iterator[tuple[Exporter, Operator]]:
    engine, _ = build_engine(EngineOptions(num_blocks=256, device="cpu", workload="pressure"))
    source = InProcessSource(runner := EngineRunner(engine, speed=SPEED), on_close=engine.close)
    attachment = Attachment(source, InProcessOperations(runner))
    source.start()
    exporter = start_exporter(attachment.poll, MetricsAddress("127.0.0.1", 0))
    try:
        yield exporter, Operator(attachment)
    finally:
        exporter.close()
        attachment.close()


def kvtop(*args: str) -> str:
    command = [sys.executable, "-m", "kvtop", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def write_files(folder: Path, target: str, alertmanager_port: int) -> Path:
    """Write the files that kvtop ships, with seconds instead of minutes, and check them."""
    rules, config = folder / "rules.yml", folder / "prometheus.yml"
    seconds = ["--window", "5s", "--for", "1s", "--interval", "1s"]
    rules.write_text(kvtop("export", "rules", *seconds, "--threshold", f"{NEARLY_FULL}=0.8"))
    address = f"127.0.0.1:{alertmanager_port}"
    options = ["--target", target, "--interval", "1s", "--rules", "rules.yml", "--alertmanager", address]
    config.write_text(kvtop("export", "prometheus-config", *options))
    for what in (("check", "rules", "--lint-fatal", str(rules)), ("check", "config", str(config))):
        done = subprocess.run(["promtool", *what], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return config


def test_alerts_reach_the_webhook_and_resolve(tmp_path):
    with contextlib.ExitStack() as opened:
        exporter, operator = opened.enter_context(engine_under_pressure())
        hook = Webhook()
        opened.callback(hook.close)
        alertmanager_port = free_port()
        config = write_files(tmp_path, f"127.0.0.1:{exporter.port}", alertmanager_port)
        opened.enter_context(alertmanager(tmp_path, hook.url, alertmanager_port))
        url = opened.enter_context(prometheus(tmp_path, config, free_port()))

        hook.wait_for({NEARLY_FULL: "firing", FRAGMENTED: "firing"}, PAGE_BOUND_S)
        page = hook.alerts[NEARLY_FULL]
        assert page["labels"]["severity"] == "warning"
        assert page["labels"]["source"] == "embedded"
        assert page["annotations"]["summary"].startswith(f"KV cache of embedded on 127.0.0.1:{exporter.port} is ")
        assert page["annotations"]["runbook_url"] == "docs/runbooks/cache-nearly-full.md"
        check_exposition(exporter)
        check_queries(url)

        operator.compact()
        hook.wait_for({FRAGMENTED: "resolved"}, PAGE_BOUND_S)
        assert hook.alerts[NEARLY_FULL]["status"] == "firing"
        operator.end_load()
        hook.wait_for({NEARLY_FULL: "resolved"}, PAGE_BOUND_S)
        assert not set(hook.alerts) - {alert.name for alert in ALERTS}


def check_exposition(exporter: Exporter) -> None:
    """Have promtool look at what is really served."""
    with urllib.request.urlopen(exporter.url, timeout=5) as answer:
        text = answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def check_queries(url: str) -> None:
    """Ask everything that is recorded or drawn. All of it has data, but that there may be no GPU."""
    assert [series["value"][1] for series in ask(url, "up")] == ["1"]
    for recording in RECORDINGS:
        assert ask(url, f"last_over_time({recording.record}[1m])"), recording.record
    drawn = [(row.title, query.expr) for row in ROWS for panel in row.panels for query in panel.queries]
    without = [
        expr
        for title, expr in drawn
        if not ask(url, expr.replace("$source", ".*").replace("$__rate_interval", "1m")) and title != "GPUs"
    ]
    assert without == []
