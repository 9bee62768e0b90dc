"""Opening the console: the terminal it needs, the engine it shows, and who closes what.

The screen opens first; the engine is started by the screen's own thread, so that nobody waits
for torch or for a trace to be read before seeing anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine, check_options
from kvtop.errors import EXIT_INTERRUPTED, SourceError, UserError
from kvtop.model.view import View
from kvtop.options_file import FileTable

if TYPE_CHECKING:
    from kvtop.engine_process import EngineProcess
    from kvtop.metrics_address import MetricsAddress
    from kvtop.recording.writer import RecordOrder
    from kvtop.targets import AttachOptions
    from kvtop.tui.app import KvtopApp

#: Seconds the first answer of an engine that is attached to may take.
_FIRST_ANSWER_S = 10.0
_CLOSED_EARLY = "the console was closed while the engine was starting"
_ELSEWHERE = "open kvtop in a terminal, or use kvtop run for a report without a screen"


class _Stream(Protocol):
    def isatty(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """How a console looks and behaves, whatever it shows.

    Attributes:
        theme: Its colours; ``None`` takes those of the last time.
        ascii_only: Write ASCII characters only.
        refresh_hz: Readings a second.
        remember: Arrange the panels as the last time, and remember how they are arranged.
        tables: The tables of the configuration file.
    """

    theme: str | None = None
    ascii_only: bool = False
    refresh_hz: float = 10.0
    remember: bool = True
    tables: Mapping[str, FileTable] = field(default_factory=dict)


def make_app(
    connect: Callable[[], Attachment], look: ConsoleOptions, *, restart: bool = True, again: str = "restarts it"
) -> KvtopApp:
    """Return a console that is yet to be run.

    Args:
        connect: Gives the attachment, and another one after the engine was lost.
        look: How it looks and behaves.
        restart: Whether another one is on offer.
        again: What the key for that does.

    Raises:
        UserError: The configuration file names a key or a panel that there is not.
    """
    from kvtop.tui.app import KvtopApp
    from kvtop.tui.memory import Memory, default_path
    from kvtop.tui.settings import read_settings

    return KvtopApp(
        connect,
        restart=connect if restart else None,
        again=again,
        refresh_hz=look.refresh_hz,
        theme=look.theme,
        ascii_only=look.ascii_only,
        settings=read_settings(look.tables, Memory(default_path()) if look.remember else None),
    )


def run_console(
    options: EngineOptions,
    look: ConsoleOptions,
    *,
    max_steps: int | None,
    metrics: MetricsAddress | None,
    in_process: bool,
    publish: str | None = None,
    record: RecordOrder | None = None,
) -> int:
    """Open the console on an embedded engine and return its exit code once it is closed.

    Args:
        options: The engine.
        look: The console.
        max_steps: Steps after which it stands still; ``None`` is no limit.
        metrics: Where to serve metrics meanwhile.
        in_process: Run the engine in this process instead of a child.
        publish: The name by which programs may attach meanwhile.
        record: The recording to write meanwhile; an engine that is restarted gets a file of its own beside it.

    Raises:
        UserError: There is no terminal to draw on, an option is wrong, or the port is taken.
    """
    require_terminal(sys.stdin, sys.stdout, sys.stderr, os.environ)
    check_options(options)
    if record is not None:
        from kvtop.recording.writer import check_order

        check_order(record)
    session = Session(options, max_steps=max_steps, in_process=in_process, publish=publish, record=record)
    exporter = None
    try:
        if metrics is not None:
            from kvtop.exporter import start_exporter
            from kvtop.headless import say

            exporter = start_exporter(session.view, metrics)
            say(f"metrics on {exporter.url}")
        app = make_app(session.connect, look)
        app.run()
        return app.return_code or 0
    finally:
        if exporter is not None:
            exporter.close()
        session.close()


def run_attached(targets: Sequence[str], options: AttachOptions, look: ConsoleOptions) -> int:
    """Open the console on a running engine and return its exit code once it is closed. The engine goes on.

    Args:
        targets: The engine, or several servers; see ``kvtop.targets``.
        options: How to attach.
        look: The console.

    Raises:
        UserError: There is no terminal to draw on, or ``target`` is wrong.
        SourceError: The engine cannot be reached.
    """
    require_terminal(sys.stdin, sys.stdout, sys.stderr, os.environ)
    from kvtop.targets import open_targets

    first = [_open_answering(targets, options)]

    def connect() -> Attachment:
        return first.pop() if first else open_targets(targets, options)

    app = make_app(connect, look, again="attaches again")
    try:
        app.run()
        return app.return_code or 0
    finally:
        for attachment in (*first, app.attachment):
            if attachment is not None:
                attachment.close()


def _open_answering(targets: Sequence[str], options: AttachOptions) -> Attachment:
    """Return targets opened; what answers there but is no engine is told before anything is shown."""
    from kvtop.targets import open_targets

    attachment = open_targets(targets, options)
    attachment.poll(_FIRST_ANSWER_S)
    reason = attachment.reason
    if reason is not None:
        attachment.close()
        raise SourceError(f"{targets[0]}: {reason}")
    return attachment


def run_attached_plain(
    targets: Sequence[str], options: AttachOptions, *, every_s: float, once: bool, panels: Sequence[str] = ()
) -> int:
    """Print a running engine's view as lines of text, every ``every_s`` or once, and return the exit code.

    Args:
        targets, options: As of ``run_attached``.
        every_s, once, panels: As of ``kvtop.plain.print_views``.

    Raises:
        UserError: A target is wrong.
        SourceError: The engine cannot be reached.
    """
    from kvtop.plain import print_views

    attachment = _open_answering(targets, options)
    try:
        return print_views(attachment, every_s=every_s, once=once, panels=panels)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        attachment.close()


def run_plain(
    options: EngineOptions,
    *,
    max_steps: int | None,
    in_process: bool,
    publish: str | None,
    every_s: float,
    once: bool,
    panels: Sequence[str] = (),
) -> int:
    """Print the embedded engine's view as lines of text, every ``every_s`` or once, and return the exit code.

    Args:
        panels: Panels to print instead of the overview; the other arguments are those of the console.

    Raises:
        KvtopError: An option is wrong, or the engine could not be started.
    """
    check_options(options)
    from kvtop.plain import print_views

    session = Session(options, max_steps=max_steps, in_process=in_process, publish=publish)
    try:
        return print_views(session.connect(), every_s=every_s, once=once, panels=panels)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        session.close()


def require_terminal(
    stdin: _Stream | None,
    stdout: _Stream | None,
    stderr: _Stream | None,
    environment: Mapping[str, str],
    instead: str = _ELSEWHERE,
) -> None:
    """Raise unless the console can draw and read keys here. Textual draws on standard error.

    Args:
        stdin, stdout, stderr: The standard streams.
        environment: The environment, for ``TERM``.
        instead: What to do where it cannot.

    Raises:
        UserError: It cannot; says why, and what to do instead.
    """
    for stream, name in ((stdin, "standard input"), (stdout, "standard output"), (stderr, "standard error")):
        if stream is None or not stream.isatty():
            raise UserError(f"{name} is not a terminal: {instead}")
    if environment.get("TERM", "") in ("dumb", "unknown"):
        raise UserError(f"TERM={environment['TERM']} cannot draw a screen: {instead}")


class Session:
    """Starts engines for the screen, one at a time, and keeps the newest attachment within reach of the exporter."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        max_steps: int | None = None,
        in_process: bool = False,
        publish: str | None = None,
        record: RecordOrder | None = None,
    ) -> None:
        self._record = record
        self._started = 0
        self._options = options
        self._max_steps = max_steps
        self._in_process = in_process
        self._publish = publish
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._starting: EngineProcess | None = None
        self._is_closed = False

    def connect(self) -> Attachment:
        """Start an engine and return the attachment to it, once the engine is ready; ends the one before.

        Raises:
            KvtopError: It could not be started.
        """
        self._release()
        self._started += 1
        attachment = self._in_this_process() if self._in_process else self._in_a_child()
        with self._lock:
            if not self._is_closed:
                self._attachment = attachment
                return attachment
        attachment.close()
        raise UserError(_CLOSED_EARLY)

    def view(self) -> View:
        """Return the newest view, from any thread."""
        attachment = self._attachment
        return View(source="embedded") if attachment is None else attachment.view

    def close(self) -> None:
        """End the engine, even one that is still starting. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            starting = self._starting
        if starting is not None:
            starting.close()
        self._release()

    def _release(self) -> None:
        with self._lock:
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _recording(self) -> RecordOrder | None:
        """Return what this start of the engine records: the first one the file asked for, a later one ``FILE.2``."""
        if self._record is None or self._started == 1:
            return self._record
        return msgspec.structs.replace(self._record, path=f"{self._record.path}.{self._started}")

    def _in_a_child(self) -> Attachment:
        from kvtop.engine_process import EngineProcess
        from kvtop.sources.local import LocalOperations, LocalSource

        process = EngineProcess.start(
            self._options, max_steps=self._max_steps, publish=self._publish, record=self._recording()
        )
        with self._lock:
            self._starting = process
            is_closed = self._is_closed
        try:
            if is_closed:
                raise UserError(_CLOSED_EARLY)
            process.wait_ready()
        except BaseException:
            process.close()
            raise
        finally:
            with self._lock:
                self._starting = None
        return Attachment(LocalSource(process), LocalOperations(process))

    def _in_this_process(self) -> Attachment:
        from kvtop.runner import EngineRunner
        from kvtop.sources.in_process import InProcessOperations, InProcessSource

        engine, notes = build_engine(self._options)
        with contextlib.ExitStack() as opened:
            opened.callback(lambda: engine.close())  # of whatever it is by then
            if self._publish is not None:
                from kvtop.server import PublishedEngine

                opened.callback(PublishedEngine(self._publish, engine.clients).close)
            if (record := self._recording()) is not None:
                from kvtop.recording.writer import record_engine

                engine = record_engine(engine, self._options, record, attached=self._publish is not None)
            closing = opened.pop_all()
        runner = EngineRunner(engine, speed=self._options.speed, max_steps=self._max_steps, notes=notes)
        source = InProcessSource(runner, on_close=closing.close)
        source.start()
        return Attachment(source, InProcessOperations(runner))
