"""EngineServer: answers the requests of connected consoles through an EngineRunner. Owns its connections' threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from allocator.clients import MAX_CLIENTS, ClientRegistry, ClientSession
from allocator.errors import AllocatorError, Refused
from kvtop.client_messages import (
    ClientAnswer,
    ClientCall,
    ClientRefused,
    Greet,
    do_call,
    refusal_of,
)
from kvtop.errors import SourceError
from kvtop.local_socket import NamedSocket, peer
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
        runner: Answers what consoles ask; without one only attached programs are answered.
        clients: Attached programs; without it, none may attach.
        engine: The engine's name, for the greeting.
        notes: Lines for the user, for the greeting.
        on_disconnect: Called in the connection's thread when a console is gone.
        send_timeout_s: Seconds in which a console must take a reply.
        max_connections: Connections at once; one more is turned away.
    """

    def __init__(
        self,
        runner: EngineRunner | None,
        *,
        clients: ClientRegistry | None = None,
        engine: str = "embedded",
        notes: tuple[str, ...] = (),
        on_disconnect: Callable[[], None] | None = None,
        send_timeout_s: float = FRAME_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._runner = runner
        self._clients = clients
        self._max_connections = max_connections
        self._hello = Hello(PROTOCOL_VERSION, os.getpid(), engine, notes)
        self._on_disconnect = on_disconnect
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._open: dict[Connection[Request], threading.Thread] = {}
        self._is_closed = False

    def serve(self, sock: socket.socket) -> None:
        """Answer on ``sock`` until the far end closes it; the socket is the server's from here on.

        Raises:
            SourceError: ``max_connections`` are open already, or the server is closed; the socket was closed.
        """
        connection = server_connection(sock)
        pid = peer(sock)[0]
        thread = threading.Thread(target=self._answer_all, args=(connection, pid), name="kvtop-serve", daemon=True)
        with self._lock:
            if self._is_closed or len(self._open) >= self._max_connections:
                connection.close()
                raise SourceError(f"no more than {self._max_connections} consoles may be connected")
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

    def _answer_all(self, connection: Connection[Request], pid: int | None) -> None:
        attached = _Attached(self._clients, pid)
        try:
            connection.send(self._hello, self._send_timeout_s)
            while not self._is_closed and not attached.is_gone():
                with contextlib.suppress(WireTimeout):
                    request = connection.receive(_LOOK_S)
                    self._reply(connection, request, attached)
        except WireError:
            pass  # gone, or not speaking our language: either way this connection has ended
        finally:
            attached.close()
            connection.close()
            with self._lock:
                self._open.pop(connection, None)
            if self._on_disconnect is not None:
                self._on_disconnect()

    def _reply(self, connection: Connection[Request], request: Request, attached: _Attached) -> None:
        try:
            answer = attached.answer(request) if isinstance(request, ClientCall) else self._answer(request)
            connection.send(answer, self._send_timeout_s)
        except MessageTooLarge as error:
            connection.send(Failed(request.number, str(error)), self._send_timeout_s)

    def _answer(self, request: Observe | PlanCommand | ApplyCommand) -> Reply:
        if self._runner is None:
            return Failed(request.number, "this engine answers attached programs only")
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


class PublishedEngine:
    """Lets programs attach to an engine by its name, until ``close``.

    Args:
        name: The name: ``kvtop.attach("local:NAME")``.
        clients: The engine's attached programs.

    Attributes:
        path: The socket.

    Raises:
        UserError: It is no name, or an engine with that name runs already.
        KvtopError: The socket cannot be made.
    """

    def __init__(self, name: str, clients: ClientRegistry) -> None:
        # With room to spare, so that one program too many is told so.
        self._server = EngineServer(None, clients=clients, engine=name, max_connections=MAX_CLIENTS + MAX_CONNECTIONS)
        self._socket = NamedSocket(name, self._server.serve)
        self.path = self._socket.path

    def close(self) -> None:
        """Stop listening and end the connections. Safe to call twice."""
        self._socket.close()
        self._server.close()


class _Attached:
    """The program at the other end of one connection, once it has said that it is one."""

    def __init__(self, clients: ClientRegistry | None, pid: int | None) -> None:
        self._clients = clients
        self._pid = pid
        self._session: ClientSession | None = None

    def answer(self, request: ClientCall) -> ClientAnswer | ClientRefused:
        """Do what the program asks, at once, in this thread."""
        try:
            if isinstance(request.call, Greet):
                self._greet(request.call)
                return ClientAnswer(request.number)
            if self._session is None:
                raise Refused("say who you are first")
            return ClientAnswer(request.number, *do_call(self._session, request.call))
        except AllocatorError as error:
            return refusal_of(request.number, error)

    def is_gone(self) -> bool:
        """Return whether the program has died while a child that inherited its connection lives on."""
        if self._session is None or self._pid is None:
            return False
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def close(self) -> None:
        """Release whatever the program still holds."""
        if self._session is not None:
            self._session.close()

    def _greet(self, call: Greet) -> None:
        if self._clients is None:
            raise Refused("this engine takes no attached programs")
        if self._session is not None:
            raise Refused("this connection has said who it is already")
        self._session = self._clients.open(call.name, self._pid or 0)


def table_from_bytes(data: bytes | None) -> np.ndarray | None:
    """Return the block table that ``Observed.focus_table`` carries. [n] int64"""
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64, copy=False)
