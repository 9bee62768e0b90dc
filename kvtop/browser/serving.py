"""``kvtop serve``: one engine or target, shown to any number of browsers, until asked to stop.

The engine belongs to this process and is published, so that tabs attach to it like any console: they all show the same
engine, and one that is closed or loaded anew disturbs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from kvtop.browser.access import Access, is_loopback
from kvtop.browser.order import ConsoleOrder
from kvtop.browser.server import ConsoleServer
from kvtop.console import ConsoleOptions, Session
from kvtop.engine_setup import EngineOptions, check_options
from kvtop.errors import EXIT_INTERRUPTED, EXIT_OK, KvtopError, SourceError, UserError
from kvtop.exporter import start_exporter
from kvtop.log import Log, LogFormat
from kvtop.metrics_address import MetricsAddress
from kvtop.metrics_server import why_not_listening
from kvtop.model.view import View
from kvtop.recording.writer import RecordOrder, check_order
from kvtop.targets import AttachOptions, open_targets
from kvtop.tui.settings import read_settings

#: Seconds between two looks at whether the engine lives.
_LOOK_EVERY_S: Final = 1.0
#: Seconds the first answer of an engine that is attached to may take.
_FIRST_ANSWER_S: Final = 10.0
_SHUTDOWN_S: Final = 2.0
_TAB_COMMAND: Final = (sys.executable, "-P", "-m", "kvtop.browser.tab")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and to whom the console is served.

    Attributes:
        host, port: Where to listen; port 0 takes a free one.
        public_url: Where a proxy in front is reached.
        allow_operations: Let browsers act on the engine, not only look.
        look: How the console looks.
        log_format: Form of the messages on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    public_url: str | None = None
    allow_operations: bool = False
    look: ConsoleOptions = field(default_factory=ConsoleOptions)
    log_format: LogFormat = "text"

    def order(self, targets: tuple[str, ...], attach: AttachOptions) -> ConsoleOrder:
        """Return what each tab's console is told."""
        attach = msgspec.structs.replace(attach, allow_operations=self.allow_operations)
        look = self.look
        return ConsoleOrder(targets, attach, look.theme, look.ascii_only, look.refresh_hz, look.tables)


class ServedEngine:
    """The embedded engine behind all tabs; started anew for the next tab after it was lost.

    Args:
        options: The engine.
        log: Told when it is lost.
        max_steps: Steps after which it stands still.
        publish: Its name.
        record: The recording to write meanwhile.

    Raises:
        KvtopError: It could not be started.
    """

    def __init__(
        self, options: EngineOptions, log: Log, *, max_steps: int | None, publish: str, record: RecordOrder | None
    ) -> None:
        self._session = Session(options, max_steps=max_steps, publish=publish, record=record)
        self._log = log
        self._lock = threading.Lock()
        self._told: str | None = None
        self._attachment = self._session.connect()

    def view(self) -> View:
        """Return the newest view, from any thread."""
        return self._session.view()

    def look(self) -> None:
        """Read once; a loss is told once."""
        with self._lock:
            lost = self._attachment.poll().error
            if lost is not None and lost != self._told:
                self._log.warning(f"{lost}; it is started anew when a page is opened")
            self._told = lost

    def ready(self) -> str | None:
        """Start the engine anew if it was lost; returns why that failed."""
        with self._lock:
            if self._attachment.poll().error is None:
                return None
            try:
                self._attachment = self._session.connect()
            except KvtopError as error:
                return str(error)
            self._log.info("the engine was started anew")
            return None

    def close(self) -> None:
        """End the engine."""
        self._session.close()


def serve_engine(
    engine: EngineOptions,
    serve: ServeOptions,
    *,
    max_steps: int | None,
    publish: str | None,
    record: RecordOrder | None,
    metrics: MetricsAddress | None,
) -> int:
    """Serve the console of an embedded engine until asked to stop, and return the exit code.

    Args:
        engine: The engine.
        serve: Where and to whom.
        max_steps: Steps after which it stands still; ``None`` is no limit.
        publish: The name by which others may attach too; by default one made of the process's number.
        record: The recording to write meanwhile.
        metrics: Where to serve metrics meanwhile.

    Raises:
        KvtopError: An option is wrong, a port is taken, or the engine could not be started.
    """
    check_options(engine)
    read_settings(serve.look.tables)
    if record is not None:
        check_order(record)
    log = Log(serve.log_format)
    access = _access(serve)
    name = publish or f"serve-{os.getpid()}"
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(_listen(serve.host, serve.port))
        log.info("starting the engine…")
        served = ServedEngine(engine, log, max_steps=max_steps, publish=name, record=record)
        opened.callback(served.close)
        if metrics is not None:
            exporter = start_exporter(served.view, metrics)
            opened.callback(exporter.close)
            log.info(f"metrics on {exporter.url}")
        order = serve.order((f"local:{name}",), AttachOptions())
        return asyncio.run(_serve(_server(order, access, log, served.ready), listening, serve, log, served.look))


def serve_targets(targets: tuple[str, ...], attach: AttachOptions, serve: ServeOptions) -> int:
    """Serve the console of a running engine, or of several servers, until asked to stop, and return the exit code.

    Args:
        targets: See ``kvtop.targets``.
        attach: How to attach.
        serve: Where and to whom.

    Raises:
        UserError: A target is wrong, or a port is taken.
        SourceError: The engine cannot be reached.
    """
    read_settings(serve.look.tables)
    log = Log(serve.log_format)
    access = _access(serve)
    order = serve.order(targets, attach)
    with _listen(serve.host, serve.port) as listening:
        first = open_targets(order.targets, order.options)
        try:
            reason = first.poll(_FIRST_ANSWER_S).error
        finally:
            first.close()
        if reason is not None:
            raise SourceError(f"{targets[0]}: {reason}")
        return asyncio.run(_serve(_server(order, access, log, lambda: None), listening, serve, log, lambda: None))


def _access(serve: ServeOptions) -> Access:
    names = (serve.host,) if is_loopback(serve.host) else (serve.host, socket.gethostname())
    return Access(names, serve.public_url)


def _server(order: ConsoleOrder, access: Access, log: Log, ready: Callable[[], str | None]) -> ConsoleServer:
    return ConsoleServer((*_TAB_COMMAND, msgspec.json.encode(order).decode()), access, log, ready)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UserError: It cannot.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--port {port} (host {host}): {why_not_listening(error)}") from None


async def _serve(
    server: ConsoleServer, listening: socket.socket, serve: ServeOptions, log: Log, look: Callable[[], None]
) -> int:
    """Serve until a signal comes, look after the engine meanwhile, and end every tab."""
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(code: int) -> None:
        if not asked.done():
            asked.set_result(code)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_OK
        asyncio.get_running_loop().add_signal_handler(number, stop, code)
    runner = web.AppRunner(await server.application(), access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        _tell(listening, serve, log)
        while not asked.done():
            await asyncio.wait([asked], timeout=_LOOK_EVERY_S)
            await asyncio.to_thread(look)
        return asked.result()
    finally:
        await server.close_tabs()
        await runner.cleanup()


def _tell(listening: socket.socket, serve: ServeOptions, log: Log) -> None:
    host = serve.host.removeprefix("[").removesuffix("]")
    place = f"[{host}]" if ":" in host else host
    what = "may act on the engine" if serve.allow_operations else "may look, not act (--allow-operations)"
    log.info(
        f"console on {serve.public_url or f'http://{place}:{listening.getsockname()[1]}/'}; whoever opens it {what}"
    )
    if not is_loopback(host):
        log.warning(f"--host {serve.host}: everyone who reaches this machine can open it; there is no password")
