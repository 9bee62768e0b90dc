"""Real Prometheus and Alertmanager on loopback, for one test: started, asked, stopped. Every wait is bounded."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_engine import until

START_BOUND_S = 20.0
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
MISSING = [
    name
    for name, found in (
        ("prometheus", shutil.which("prometheus")),
        ("promtool", shutil.which("promtool")),
        ("alertmanager", ALERTMANAGER),
    )
    if found is None
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


@contextmanager
def running(command: list[str], ready_url: str, log: Path) -> Iterator[None]:
    """Run a server until the context ends; it is ready once its address answers."""

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            get(ready_url)
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            until(is_ready, START_BOUND_S)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def prometheus(folder: Path, config: Path, port: int) -> Iterator[str]:
    """Run Prometheus, and give its address."""
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--rules.alert.resend-delay=1s", "--log.level=warn"]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/-/ready", folder / "prometheus.log"):
        yield url


@contextmanager
def alertmanager(folder: Path, hook_url: str, port: int) -> Iterator[None]:
    """Run Alertmanager; it tells a webhook of what fires and what resolves, about every second."""
    assert ALERTMANAGER is not None
    config = folder / "alertmanager.yml"
    route = {"receiver": "hook", "group_by": ["alertname"], "group_wait": "0s", "group_interval": "1s"}
    receiver = {"name": "hook", "webhook_configs": [{"url": hook_url, "send_resolved": True}]}
    config.write_text(json.dumps({"route": route, "receivers": [receiver]}))
    command = [ALERTMANAGER, f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn"]
    with running(command, f"http://127.0.0.1:{port}/-/ready", folder / "alertmanager.log"):
        yield


class Webhook:
    """Where Alertmanager sends what it has to tell."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.alerts: dict[str, dict[str, Any]] = {}
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for alert in json.loads(body)["alerts"]:
                    told.put(alert)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def wait_for(self, wanted: Mapping[str, str], timeout_s: float) -> None:
        """Wait until each alert named has the status wanted, firing or resolved."""
        deadline_s = time.monotonic() + timeout_s
        while any(self.alerts.get(name, {}).get("status") != status for name, status in wanted.items()):
            left_s = deadline_s - time.monotonic()
            try:
                alert = self.told.get(timeout=max(0.0, left_s))
            except queue.Empty:
                now = {name: alert["status"] for name, alert in self.alerts.items()}
                raise AssertionError(f"not in {timeout_s:g} s: {dict(wanted)}; told so far: {now}") from None
            self.alerts[alert["labels"]["alertname"]] = alert

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def ask(prometheus_url: str, expr: str) -> list[dict[str, Any]]:
    """Return the series an expression has now."""
    query = urllib.parse.urlencode({"query": expr})
    try:
        answer = json.loads(get(f"{prometheus_url}/api/v1/query?{query}"))
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expr}: {error.read().decode()}") from None
    assert answer["status"] == "success", (expr, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result
