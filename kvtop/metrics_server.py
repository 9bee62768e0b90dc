"""MetricsServer: HTTP for scrapers, and nothing else. Everything a client can do is bounded.

One thread accepts; each request is answered in a short-lived thread, at most ``MAX_CLIENTS`` at once, TLS handshake
included, and whoever takes longer than ``REQUEST_BOUND_S`` in all is cut off. So neither a slow client nor a
half-open connection keeps a scraper waiting. Paths are compared as they come; no file is ever looked for.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from kvtop.errors import UserError
from kvtop.metrics_address import MetricsAddress
from kvtop.metrics_secrets import MetricsSecrets

#: A client that sends or takes nothing for longer loses its connection, and its thread ends. [s]
CLIENT_TIMEOUT_S: Final = 5.0
#: Time a request may take in all, however steadily its bytes drip. [s]
REQUEST_BOUND_S: Final = 10.0
#: Requests answered at once; more are turned away.
MAX_CLIENTS: Final = 32
#: Seconds between two looks for clients that take too long, and the longest ``close`` waits for the accepting thread.
_LOOK_EVERY_S: Final = 0.25
_END_S: Final = 5.0

OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_TEXT_TYPE: Final = "text/plain; charset=utf-8"
_INDEX: Final = b"kvtop\n\n/metrics\n/-/healthy\n/-/ready\n"


class MetricsServer:
    """Serves ``/metrics``, ``/-/healthy`` and ``/-/ready`` until ``close``.

    Args:
        registry: What is scraped.
        address: Where and how to listen.
        not_ready: Returns why there is nothing to scrape yet; ``None`` when there is.
        complain: Told when a changed file of keys or passwords is not usable.

    Raises:
        UserError: The address cannot be listened on, or a file of keys or passwords is not usable.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        address: MetricsAddress,
        not_ready: Callable[[], str | None],
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.host = address.host.removeprefix("[").removesuffix("]")
        self._scheme = "http" if address.tls_cert is None else "https"
        secrets = MetricsSecrets(address, complain)
        handler = _make_handler(registry, not_ready, secrets)
        try:
            self._server = _Server(self.host, address.port, handler, secrets)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"--metrics-port {address.port} (host {address.host}): {why_not_listening(error)}"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_EVERY_S,), name="kvtop-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the metrics are served."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self._scheme}://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_clients(time.monotonic())
        self._thread.join(_END_S)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the exposition in the format that a client accepts, and its content type.

    Names are written as they are: the library would write the colons of vLLM's as underscores in OpenMetrics.
    """
    if "application/openmetrics-text" in accept:
        return generate_openmetrics(registry, ALLOWUTF8), OPENMETRICS_TYPE
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], secrets: MetricsSecrets) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        self._secrets = secrets
        #: Clients being answered: the socket to cut off, by the socket accepted, and when it is due.
        self._clients: dict[Any, tuple[socket.socket, float]] = {}
        self._clients_lock = threading.Lock()
        super().__init__((str(where[0]), port), handler)

    def server_bind(self) -> None:
        # Without HTTPServer's look-up of the host's own name, which may take seconds and is not needed.
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._clients_lock:
            if len(self._clients) >= MAX_CLIENTS:
                return False
            self._clients[request] = request, time.monotonic() + REQUEST_BOUND_S
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(CLIENT_TIMEOUT_S)
            tls = self._secrets.tls
            if tls is None:
                super().finish_request(request, client_address)
                return
            with tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as wrapped:
                with self._clients_lock:
                    self._clients[request] = wrapped, self._clients[request][1]
                wrapped.do_handshake()
                super().finish_request(wrapped, client_address)
        finally:
            with self._clients_lock:
                self._clients.pop(request, None)

    def service_actions(self) -> None:
        """Called between connections: cut off who takes too long, and look for new keys and passwords."""
        self.drop_clients(time.monotonic() - REQUEST_BOUND_S)
        self._secrets.refresh()

    def drop_clients(self, started_before_s: float) -> None:
        """Cut off the clients whose request came before a time."""
        with self._clients_lock:
            for sock, due_s in self._clients.values():
                if due_s - REQUEST_BOUND_S <= started_before_s:
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no news."""


def _make_handler(
    registry: CollectorRegistry, not_ready: Callable[[], str | None], secrets: MetricsSecrets
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "kvtop", ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if not secrets.allow(self.headers.get("Authorization", "")):
                self._send(HTTPStatus.UNAUTHORIZED, b"a user and a password are needed\n", with_body=with_body)
                return
            match self.path.partition("?")[0]:
                case "/metrics":
                    try:
                        body, content_type = render(registry, self.headers.get("Accept", ""))
                    except Exception as error:  # told to the scraper, whose alert on the target's absence then fires
                        text = f"the metrics could not be made: {error!r}\n".encode()
                        self._send(HTTPStatus.INTERNAL_SERVER_ERROR, text, with_body=with_body)
                        return
                    self._send(HTTPStatus.OK, body, content_type, with_body=with_body)
                case "/-/healthy":
                    self._send(HTTPStatus.OK, b"healthy\n", with_body=with_body)
                case "/-/ready":
                    reason = not_ready()
                    status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
                    self._send(status, f"{reason or 'ready'}\n".encode(), with_body=with_body)
                case "/":
                    self._send(HTTPStatus.OK, _INDEX, with_body=with_body)
                case _:
                    self._send(HTTPStatus.NOT_FOUND, b"not found; the metrics are at /metrics\n", with_body=with_body)

        def _send(
            self, status: HTTPStatus, body: bytes, content_type: str = _TEXT_TYPE, *, with_body: bool = True
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", 'Basic realm="kvtop", charset="UTF-8"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a scrape a second would drown everything else."""

    return Handler


def why_not_listening(error: OSError | UnicodeError) -> str:
    """Return why an address cannot be listened on, and what to do."""
    if isinstance(error, UnicodeError):
        return "not a host's name"
    if error.errno == errno.EADDRINUSE:
        return "in use already; choose another port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return "not allowed; ports from 1024 on need no rights"
    return f"cannot listen there: {(error.strerror or str(error)).lower()}"
