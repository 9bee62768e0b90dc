"""EngineServer: answers the requests of connected consoles through an EngineRunner. Owns its connections' threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from kvtop.errors import SourceError
from kvtop.runner import EngineRunner
from kvtop.wire import (
    FRAME_TIMEOUT_S,
    PROTOCOL_VERSION,
    Applied,
    ApplyCommand,
    Connection,
    Failed,
    Hello,
    MessageTooLarge,
    Observe,
    Observed,
    PlanCommand,
    Planned,
    Reply,
    Request,
    WireError,
    WireTimeout,
    server_connection,
)

MAX_CONNECTIONS: Final = 16
#: Seconds a request may ask to wait, at most.
_MAX_WAIT_S: Final = 600.0
#: Seconds between looks at whether the server was closed, on a connection that asks nothing.
_LOOK_S: Final = 1.0


class EngineServer:
    """Serves each connection in a thread of its own.

    Args:
        runner: Answers what is asked.
        engine: The engine's name, for the greeting.
        notes: Lines for the user, for the greeting.
        on_disconnect: Called in the connection's thread when a console is gone.
        send_timeout_s: Seconds in which a console must take a reply.
    """

    def __init__(
        self,
        runner: EngineRunner,
        *,
        engine: str = "embedded",
        notes: tuple[str, ...] = (),
        on_disconnect: Callable[[], None] | None = None,
        send_timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        self._runner = runner
        self._hello = Hello(PROTOCOL_VERSION, os.getpid(), engine, notes)
        self._on_disconnect = on_disconnect
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._open: dict[Connection[Request], threading.Thread] = {}
        self._is_closed = False

    def serve(self, sock: socket.socket) -> None:
        """Answer on ``sock`` until the far end closes it; the socket is the server's from here on.

        Raises:
            SourceError: ``MAX_CONNECTIONS`` are open already, or the server is closed; the socket was closed.
        """
        connection = server_connection(sock)
        thread = threading.Thread(target=self._answer_all, args=(connection,), name="kvtop-serve", daemon=True)
        with self._lock:
            if self._is_closed or len(self._open) >= MAX_CONNECTIONS:
                connection.close()
                raise SourceError(f"no more than {MAX_CONNECTIONS} consoles may be connected")
            self._open[connection] = thread
        thread.start()

    def close(self) -> None:
        """Close every connection and wait for their threads, a second at most. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            threads = dict(self._open)
        for connection in threads:
            connection.shut_down()  # its own thread closes it
        for thread in threads.values():
            if thread is not threading.current_thread():
                thread.join(1.0 / len(threads))

    def _answer_all(self, connection: Connection[Request]) -> None:
        try:
            connection.send(self._hello, self._send_timeout_s)
            while not self._is_closed:
                with contextlib.suppress(WireTimeout):
                    request = connection.receive(_LOOK_S)
                    self._reply(connection, request)
        except WireError:
            pass  # gone, or not speaking our language: either way this connection has ended
        finally:
            connection.close()
            with self._lock:
                self._open.pop(connection, None)
            if self._on_disconnect is not None:
                self._on_disconnect()

    def _reply(self, connection: Connection[Request], request: Request) -> None:
        try:
            connection.send(self._answer(request), self._send_timeout_s)
        except MessageTooLarge as error:
            connection.send(Failed(request.number, str(error)), self._send_timeout_s)

    def _answer(self, request: Request) -> Reply:
        timeout_s = min(request.timeout_s, _MAX_WAIT_S) if request.timeout_s > 0 else 0.0
        try:
            match request:
                case Observe(number, focus):
                    seen = self._runner.observe(focus, timeout_s)
                    table = None if seen.focus_table is None else seen.focus_table.astype("<i8", copy=False).tobytes()
                    return Observed(number, seen.snapshot, table, seen.focus_block)
                case PlanCommand(number, command):
                    return Planned(number, self._runner.plan(command, timeout_s))
                case ApplyCommand(number, command):
                    return Applied(number, self._runner.apply(command, timeout_s))
        except SourceError as error:
            return Failed(request.number, str(error))


def table_from_bytes(data: bytes | None) -> np.ndarray | None:
    """Return the block table that ``Observed.focus_table`` carries. [n] int64"""
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64, copy=False)
