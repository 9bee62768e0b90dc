"""kvtop in an on-call rotation: a daemon under pressure, a real Prometheus, a real Alertmanager, a page that comes.

The engine is a real ``kvtop run --publish``; ``Operator`` does what an operator types in another terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published import daemon_process
from real_servers import MISSING, Webhook, alertmanager, ask, free_port, prometheus

from allocator.config import MIN_LOAD_SCALE
from kvtop.monitoring.alerts import ALERTS, RECORDINGS
from kvtop.monitoring.panels import ROWS

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
    """Drives the daemon with ``kvtop ctl``, as from another terminal."""

    def __init__(self, name: str) -> None:
        self._name = name

    def ctl(self, *words: str) -> dict[str, Any]:
        """Run a command that must be done, and return what it says of itself."""
        said: dict[str, Any] = json.loads(kvtop("ctl", "--to", self._name, "--json", *words))
        return said

    def compact(self) -> None:
        """Stop where there is something to move, and move blocks together, plan first."""
        for _ in range(20):
            self.ctl("pause")
            planned = self.ctl("--dry-run", "compact")["plan"]
            if planned["moved_blocks"]:
                break
            self.ctl("resume")
        assert planned["moved_blocks"] > 0
        assert planned["refusal"] is None
        assert self.ctl("compact")["outcome"]["ok"]

    def end_load(self) -> None:
        """Let hardly anybody come any more, and those who wait be served soon."""
        self.ctl("set-load", str(MIN_LOAD_SCALE))
        self.ctl("speed", "max")
        self.ctl("resume")


@contextlib.contextmanager
def daemon_under_pressure(name: str) -> Iterator[str]:
    """Run the daemon, and yield where it serves its metrics."""
    options = ["--blocks", "256", "--workload", "pressure", "--speed", f"{SPEED:g}", "--metrics-port", "0"]
    with daemon_process(name, *options) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "metrics on " in line)
        yield said.strip().partition("metrics on ")[2]


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
    name = f"rotation-{os.getpid()}"
    with contextlib.ExitStack() as opened:
        metrics_url = opened.enter_context(daemon_under_pressure(name))
        operator, target = Operator(name), urllib.parse.urlsplit(metrics_url).netloc
        hook = Webhook()
        opened.callback(hook.close)
        alertmanager_port = free_port()
        config = write_files(tmp_path, target, alertmanager_port)
        opened.enter_context(alertmanager(tmp_path, hook.url, alertmanager_port))
        url = opened.enter_context(prometheus(tmp_path, config, free_port()))

        hook.wait_for({NEARLY_FULL: "firing", FRAGMENTED: "firing"}, PAGE_BOUND_S)
        page = hook.alerts[NEARLY_FULL]
        assert page["labels"]["severity"] == "warning"
        assert page["labels"]["source"] == "embedded"
        assert page["annotations"]["summary"].startswith(f"KV cache of {page['labels']['source']} on {target} is ")
        assert page["annotations"]["runbook_url"] == "docs/runbooks/cache-nearly-full.md"
        check_exposition(metrics_url)
        check_queries(url)

        operator.compact()
        hook.wait_for({FRAGMENTED: "resolved"}, PAGE_BOUND_S)
        assert hook.alerts[NEARLY_FULL]["status"] == "firing"
        operator.end_load()
        hook.wait_for({NEARLY_FULL: "resolved"}, PAGE_BOUND_S)
        assert not set(hook.alerts) - {alert.name for alert in ALERTS}


def check_exposition(url: str) -> None:
    """Have promtool look at what is really served."""
    with urllib.request.urlopen(url, timeout=5) as answer:
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
