"""A stand-in for a server over the network: one of our engines behind vLLM's metric names, on a port of this machine.

It answers ``/metrics`` and ``/version`` as such a server does, and nothing else. Its engine goes on by a step with
every page that is asked for, so that nobody needs to drive it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from kvtop.attachment import Attachment
from kvtop.learn.lesson import EngineSpec
from kvtop.operations import ReadOnly
from kvtop.sources.in_process import InProcessSource
from kvtop.sources.remote.source import RemoteSource

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Steps of a server's engine between two pages: few, so that what was read is still about true when it is asked.
STEPS_A_PAGE: Final = 1
#: The release whose metric names it writes.
VERSION: Final = "0.33.0"
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class StandIn:
    """Serves one engine until ``close``.

    Args:
        engine: The engine; nobody else may use it from here on.
        name: Its model's name.

    Attributes:
        url: Where it is.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        from prometheus_client import generate_latest
        from prometheus_client.registry import CollectorRegistry

        from kvtop.compat import VllmCollector
        from kvtop.runner import EngineRunner

        runner = EngineRunner(engine, paused=True)
        self._attachment = Attachment(InProcessSource(runner, name=name, on_close=engine.close), ReadOnly("a server"))
        registry = CollectorRegistry()
        registry.register(VllmCollector(lambda: (self._attachment.view,)))
        lock = threading.Lock()

        def page() -> bytes:
            with lock:
                engine.advance(STEPS_A_PAGE)
                self._attachment.poll()
                return generate_latest(registry)

        self._attachment.poll()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(page))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvtop-stand-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and end the engine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
        self._attachment.close()


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, _TEXT, page())
            elif path == "/version":
                self._answer(200, "application/json", f'{{"version":"{VERSION}"}}'.encode())
            else:
                self._answer(404, "application/json", b'{"detail":"Not Found"}')

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the screen is drawn on standard error."""

    return Handler


class _ServedSource(RemoteSource):
    """A source that ends the server it reads."""

    def __init__(self, server: StandIn) -> None:
        super().__init__(server.url)
        self._stand_in = server

    def close(self) -> None:
        super().close()
        self._stand_in.close()


def open_server(spec: EngineSpec, build: Callable[[EngineSpec], Engine]) -> Attachment:
    """Start a server for an engine and return the attachment to it, as to any server; closing that ends both.

    Args:
        spec: The engine.
        build: Builds it.
    """
    engine = build(spec)
    while engine.step < spec.warm_steps and engine.advance(spec.warm_steps - engine.step):
        pass
    source = _ServedSource(StandIn(engine, "llama-3-8b"))
    return Attachment(source, ReadOnly(source.missing["operations"]))
