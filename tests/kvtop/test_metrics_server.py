"""The metrics server over real sockets: paths, methods, formats, TLS, passwords; and clients that mean no good."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import until
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvtop import metrics_server as server_module
from kvtop.errors import UserError
from kvtop.exporter import Exporter, start_exporter
from kvtop.metrics_address import MetricsAddress
from kvtop.metrics_secrets import MetricsSecrets
from kvtop.metrics_server import MAX_CLIENTS, MetricsServer
from kvtop.model.view import View

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"


class NoNvml:
    """A machine without the driver's library."""

    class NVMLError(Exception):
        value = 12

    def nvmlInit(self) -> None:
        raise self.NVMLError


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", port: int = 0, **how: str) -> Iterator[Exporter]:
    exporter = start_exporter(lambda: View(source="embedded"), MetricsAddress(host, port, **how), nvml=NoNvml())
    try:
        yield exporter
    finally:
        exporter.close()


def ask(
    exporter: Exporter, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection(exporter.host, exporter.port, timeout=5)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_serves_on_a_free_port_and_stops():
    with serving() as exporter:
        assert exporter.url == f"http://127.0.0.1:{exporter.port}/metrics"
        status, headers, body = ask(exporter)
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert 'kvtop_source_up{source="embedded"} 0.0' in body
        assert {family.name for family in parse_text(body)} >= {"kvtop_source_up"}
        exporter.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((exporter.host, exporter.port), timeout=5)


def test_open_metrics_when_asked_for_with_vllm_s_names_as_they_are(full_view):
    exporter = start_exporter(lambda: full_view, MetricsAddress("127.0.0.1", 0, compat="vllm"), nvml=NoNvml())
    try:
        _, headers, body = ask(exporter, Accept=OPENMETRICS)
    finally:
        exporter.close()
    assert headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert {"vllm:num_preemptions", "kvtop_copy_seconds"} <= {family.name for family in parse_openmetrics(body)}
    assert 'vllm:num_preemptions_total{engine="0"' in body
    assert body.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/metrics", "/metrics?x=1", "/-/healthy", "/"])
def test_head_is_get_without_the_body(path):
    with serving() as exporter:
        status, headers, body = ask(exporter, path, "HEAD")
        assert (status, body) == (200, "")
        assert headers["Content-Length"] == str(len(ask(exporter, path)[2]))


@pytest.mark.parametrize(
    "path", ["/metricsx", "/metrics/", "/../etc/passwd", "/%2e%2e/metrics", "/favicon.ico", "/-/quit", "*"]
)
def test_what_is_not_there_is_not_found(path):
    with serving() as exporter:
        assert ask(exporter, path)[0] == 404


def test_other_methods_are_refused():
    with serving() as exporter:
        assert ask(exporter, method="POST")[0] == 501


def test_ready_once_there_is_something_to_scrape():
    reasons = ["embedded: gone", None]
    server = MetricsServer(CollectorRegistry(), MetricsAddress("127.0.0.1", 0), lambda: reasons[0])
    try:
        assert ask(server, "/-/ready")[::2] == (503, "embedded: gone\n")
        assert ask(server, "/-/healthy")[::2] == (200, "healthy\n")
        del reasons[0]
        assert ask(server, "/-/ready")[::2] == (200, "ready\n")
    finally:
        server.close()
    with serving() as exporter:
        assert ask(exporter, "/-/ready")[::2] == (503, "embedded: no fresh reading\n")


def test_metrics_that_cannot_be_made_are_an_error_of_the_server():
    class Broken:
        def collect(self):
            if self.is_armed:
                raise ValueError("no")
            return []

    broken = Broken()
    broken.is_armed = False
    registry = CollectorRegistry()
    registry.register(broken)
    broken.is_armed = True
    server = MetricsServer(registry, MetricsAddress("127.0.0.1", 0), lambda: None)
    try:
        assert ask(server)[::2] == (500, "the metrics could not be made: ValueError('no')\n")
    finally:
        server.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_with_and_without_brackets(host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(host) as exporter:
        assert exporter.url == f"http://[::1]:{exporter.port}/metrics"
        assert ask(exporter)[0] == 200


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"--metrics-port {port} \(host 127.0.0.1\): in use already") as caught,
            serving(port=port),
        ):
            pass
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["203.0.113.7", "no host", "a" * 70])
def test_an_address_of_another_machine_is_one_clear_line(host):
    with pytest.raises(UserError, match=r"^--metrics-port 0 \(host .*\): (cannot listen there: |not a host's name)"):
        MetricsServer(CollectorRegistry(), MetricsAddress(host, 0), lambda: None)


# -- passwords -------------------------------------------------------------------------------------


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    path = tmp_path / "auth"
    path.write_text("# who may look\n\nprometheus:s:3cret\ngrafana:é\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("given", ["prometheus:s:3cret", "grafana:é"])
def test_a_right_password_opens(auth_file, given):
    with serving(auth_file=str(auth_file)) as exporter:
        assert ask(exporter, Authorization=basic(given))[0] == 200


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !!!", "Bearer x", basic("prometheus:"), basic("prometheus:s:3cre"), basic("# who may look")],
)
@pytest.mark.parametrize("path", ["/metrics", "/-/ready", "/x"])
def test_nothing_is_told_without(auth_file, header, path):
    with serving(auth_file=str(auth_file)) as exporter:
        status, headers, body = ask(exporter, path, Authorization=header)
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Basic ")
        assert "kvtop_" not in body


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("a:b\n", 0o644, "everybody can read or write it"),
        ("", 0o600, "needs lines of USER:PASSWORD"),
        ("# only\n", 0o600, "needs lines of USER:PASSWORD"),
        ("a:b\nnobody\n", 0o600, "needs lines of USER:PASSWORD"),
        ("a:" + "x" * 70_000, 0o600, "needs lines of USER:PASSWORD"),
        (None, 0, "no such file or directory"),
    ],
)
def test_a_file_of_passwords_that_cannot_be_used_is_one_clear_line(tmp_path, text, mode, says):
    path = tmp_path / "auth"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(UserError, match=f"^--metrics-auth .*auth: {says}"), serving(auth_file=str(path)):
        pass


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate of this machine by its own word; return its file and its key's."""
    cert, key = str(folder / "made-cert.pem"), str(folder / "made-key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=30)
    return cert, key


def test_tls_with_a_certificate_a_client_can_check(tls_files):
    cert, key = tls_files
    with serving(tls_cert=cert, tls_key=key) as exporter:
        assert exporter.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        connection = http.client.HTTPSConnection("127.0.0.1", exporter.port, timeout=5, context=trusting)
        connection.request("GET", "/metrics")
        assert b"kvtop_source_up" in connection.getresponse().read()
        connection.close()


def test_a_client_that_never_shakes_hands_keeps_nobody_waiting(tls_files):
    cert, key = tls_files
    with serving(tls_cert=cert, tls_key=key) as exporter:
        with socket.create_connection((exporter.host, exporter.port), timeout=5):
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection("127.0.0.1", exporter.port, timeout=4, context=context)
            connection.request("GET", "/-/healthy")
            assert connection.getresponse().status == 200
            connection.close()
        with socket.create_connection((exporter.host, exporter.port), timeout=5) as plain:
            plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"kvtop" not in plain.recv(1000)


def test_keys_that_cannot_be_used_are_one_clear_line(tmp_path, tls_files):
    cert, key = tls_files
    nothing, locked = tmp_path / "nothing", tmp_path / "locked"
    nothing.write_text("")
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", str(locked), "-passout", "pass:x"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    for certificate, its_key in ((str(nothing), key), (cert, cert), (cert, str(locked)), ("absent.pem", key)):
        with (
            pytest.raises(UserError, match=r"^--metrics-tls-cert .*, --metrics-tls-key ") as caught,
            serving(tls_cert=certificate, tls_key=its_key),
        ):
            pass
        assert "\n" not in str(caught.value)


# -- files that change -----------------------------------------------------------------------------


def replace(path: str, text: str) -> None:
    """Put another file in a file's place, as tools do that renew certificates."""
    fresh = Path(path + ".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.rename(path)


def test_changed_passwords_hold_and_unusable_ones_change_nothing(auth_file):
    said: list[str] = []
    secrets = MetricsSecrets(MetricsAddress("127.0.0.1", 0, auth_file=str(auth_file)), said.append)
    old, new = basic("prometheus:s:3cret"), basic("prometheus:other")
    secrets.refresh()
    assert (secrets.allow(old), secrets.allow(new)) == (True, False)
    replace(str(auth_file), "nobody\n")
    for _ in range(3):
        secrets.refresh()
    assert secrets.allow(old)
    assert len(said) == 1, "once a change, not once a look"
    assert said[0].endswith("at least one; what was read before still holds")
    auth_file.unlink()
    secrets.refresh()
    assert secrets.allow(old)
    assert "no such file" in said[1]
    replace(str(auth_file), "prometheus:other\n")
    secrets.refresh()
    assert (secrets.allow(old), secrets.allow(new)) == (False, True)


def test_a_password_out_of_a_pipe_is_read_once(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"a:b\n")
    os.close(writing)
    try:
        secrets = MetricsSecrets(MetricsAddress("127.0.0.1", 0, auth_file=f"/dev/fd/{reading}"))
        secrets.refresh()
        assert secrets.allow(basic("a:b"))
    finally:
        os.close(reading)


def test_a_server_takes_a_renewed_certificate(tmp_path, tls_files):
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    for source, copy in zip(tls_files, (cert, key), strict=True):
        shutil.copy(source, copy)
    with serving(tls_cert=cert, tls_key=key) as exporter:
        first = ssl.get_server_certificate((exporter.host, exporter.port), timeout=5)
        fresh_cert, fresh_key = make_certificate(tmp_path)
        replace(cert, Path(fresh_cert).read_text())  # the key is still the old one: both or none
        replace(key, Path(fresh_key).read_text())
        until(lambda: ssl.get_server_certificate((exporter.host, exporter.port), timeout=5) != first)


# -- hostile clients -------------------------------------------------------------------------------


def test_a_client_that_stops_halfway_is_let_go_without_a_word(monkeypatch, capfd):
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 0.05)
    with serving() as exporter:
        with socket.create_connection((exporter.host, exporter.port), timeout=5) as client:
            client.sendall(b"GET /metr")
            assert client.recv(100) == b""
        assert ask(exporter)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_drips_is_cut_off_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(server_module, "REQUEST_BOUND_S", 0.0)
    with serving() as exporter, socket.create_connection((exporter.host, exporter.port), timeout=5) as client:
        client.sendall(b"GET /metr")
        assert client.recv(100) == b""


def test_more_clients_than_are_answered_are_turned_away_and_those_after_them_are_not():
    with serving() as exporter, contextlib.ExitStack() as opened:
        address = exporter.host, exporter.port
        for _ in range(MAX_CLIENTS):
            opened.enter_context(socket.create_connection(address, timeout=5)).sendall(b"GET ")
        with socket.create_connection(address, timeout=5) as late:
            late.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert late.recv(100) == b""
        exporter._server._server.drop_clients(float("inf"))
        until(lambda: not exporter._server._server._clients)
        assert ask(exporter)[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000_000 + b" HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n" + b"X: " + b"y" * 10_000_000 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"GET /metrics HTTP/9.9.9\r\n\r\n",
        b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["bytes", "path", "header", "headers", "version", "empty", "http2"],
)
def test_garbage_harms_nobody(garbage, capfd):
    with serving() as exporter:
        address = exporter.host, exporter.port
        reset = contextlib.suppress(ConnectionResetError, BrokenPipeError)
        with socket.create_connection(address, timeout=5) as client, reset:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            assert b"kvtop_source_up" not in client.recv(1000)
        assert ask(exporter)[0] == 200
    assert capfd.readouterr().err == ""
