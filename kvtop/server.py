"""EngineServer: answers the requests of connected consoles through an EngineRunner. Owns its connections' threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

import numpy as np

from allocator.clients import MAX_CLIENTS, ClientRegistry, ClientSession
from allocator.commands import Command
from allocator.errors import AllocatorError, Refused
from allocator.plans import Outcome, Plan
from kvtop.audit import AuditLog, audit_path
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
from kvtop.log import Log
from kvtop.model.observation import Focus, Observation
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
    WireClosed,
    WireError,
    WireTimeout,
    server_connection,
)

MAX_CONNECTIONS: Final = 16
#: Seconds a request may ask to wait, at most.
_MAX_WAIT_S: Final = 600.0
#: Seconds between looks at whether the server was closed, on a connection that asks nothing.
_LOOK_S: Final = 1.0
#: Seconds in which whoever connects by name must ask something.
FIRST_WORD_S: Final = 30.0

#: Process and user at the other end, as far as the system says.
Who: TypeAlias = tuple[int | None, int | None]


class Answers(Protocol):
    """What consoles ask of an engine; ``EngineRunner`` answers it. Each raises ``SourceError`` where it cannot."""

    def observe(self, focus: Focus, timeout_s: float) -> Observation: ...

    def plan(self, command: Command, timeout_s: float) -> Plan: ...

    def apply(self, command: Command, timeout_s: float) -> Outcome: ...


class EngineServer:
    """Serves each connection in a thread of its own.

    Args:
        runner: Answers what consoles ask; without one only attached programs are answered.
        clients: Attached programs; without it, none may attach.
        engine: The engine's name, for the greeting.
        notes: Lines for the user, for the greeting.
        missing: What the engine does not offer, with the reason, for the greeting.
        on_disconnect: Called in the connection's thread when a console is gone.
        send_timeout_s: Seconds in which a console must take a reply.
        max_connections: Connections at once; one more is turned away.
        first_word_s: Seconds in which whoever connects must ask something; ``None`` is no limit.
        audit: Told of every command that is done here.
        complain: Told of every connection that ended otherwise than by being closed.
    """

    def __init__(
        self,
        runner: Answers | None,
        *,
        clients: ClientRegistry | None = None,
        engine: str = "embedded",
        notes: tuple[str, ...] = (),
        missing: Mapping[str, str] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        send_timeout_s: float = FRAME_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        first_word_s: float | None = None,
        audit: AuditLog | None = None,
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._runner = runner
        self._first_word_s = first_word_s
        self._audit = audit
        self._complain = complain
        self._clients = clients
        self._max_connections = max_connections
        self._hello = Hello(PROTOCOL_VERSION, os.getpid(), engine, notes, dict(missing or {}))
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
        who = peer(sock)
        thread = threading.Thread(target=self._answer_all, args=(connection, who), name="kvtop-serve", daemon=True)
        with self._lock:
            if self._is_closed or len(self._open) >= self._max_connections:
                connection.close()
                raise SourceError(f"no more than {self._max_connections} connections at once")
            self._open[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            with self._lock:
                del self._open[connection]
            connection.close()
            raise SourceError(str(error)) from None

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

    def _answer_all(self, connection: Connection[Request], who: Who) -> None:
        attached = _Attached(self._clients, who[0])
        deadline_s = None if self._first_word_s is None else time.monotonic() + self._first_word_s
        try:
            connection.send(self._hello, self._send_timeout_s)
            while not self._is_closed and not attached.is_gone():
                try:
                    request = connection.receive(_LOOK_S)
                except WireTimeout:
                    if deadline_s is not None and time.monotonic() >= deadline_s:
                        raise WireError(f"asked nothing in {self._first_word_s:g} s") from None
                    continue
                deadline_s = None
                self._reply(connection, request, attached, who)
        except WireClosed:
            pass  # gone: the usual end
        except WireError as error:
            self._complain(f"pid {who[0]}: connection ended: {error}")
        finally:
            attached.close()
            connection.close()
            with self._lock:
                self._open.pop(connection, None)
            if self._on_disconnect is not None:
                self._on_disconnect()

    def _reply(self, connection: Connection[Request], request: Request, attached: _Attached, who: Who) -> None:
        try:
            answer = attached.answer(request) if isinstance(request, ClientCall) else self._answer(request, who)
            connection.send(answer, self._send_timeout_s)
        except MessageTooLarge as error:
            connection.send(Failed(request.number, str(error)), self._send_timeout_s)

    def _answer(self, request: Observe | PlanCommand | ApplyCommand, who: Who) -> Reply:
        if self._runner is None:
            return Failed(request.number, "this engine answers attached programs only")
        timeout_s = min(request.timeout_s, _MAX_WAIT_S) if request.timeout_s > 0 else 0.0
        try:
            match request:
                case Observe(number, focus):
                    seen = self._runner.observe(focus, timeout_s)
                    table = None if seen.focus_table is None else seen.focus_table.astype("<i8", copy=False).tobytes()
                    return Observed(number, seen.snapshot, table, seen.focus_block, seen.next_victims, seen.lineage)
                case PlanCommand(number, command):
                    return Planned(number, self._runner.plan(command, timeout_s))
                case ApplyCommand(number, command):
                    return Applied(number, self._apply(self._runner, command, timeout_s, who))
        except SourceError as error:
            return Failed(request.number, str(error))

    def _apply(self, runner: Answers, command: Command, timeout_s: float, who: Who) -> Outcome:
        """Do a command; with an audit log, a line is left there whatever came of it."""
        if self._audit is None:
            return runner.apply(command, timeout_s)
        engine, plan = self._hello.engine, None
        try:
            plan = runner.plan(command, timeout_s)
            outcome = runner.apply(command, timeout_s)
        except SourceError as error:
            self._audit.write(engine, who, command, plan, None, str(error))
            raise
        self._audit.write(engine, who, command, plan, outcome)
        return outcome


class PublishedEngine:
    """Lets programs attach to an engine by its name, and consoles watch and drive it, until ``close``.

    Args:
        name: The name: ``kvtop.attach("local:NAME")``, ``kvtop attach local:NAME``.
        clients: The engine's attached programs.
        make_runner: Makes the engine's runner around the descriptor of its block map, an empty file that stays this
            object's. The calling thread must have claimed it. Without one, only attached programs are answered.
        notes: Lines for the user, for the greeting.
        log: Told of bad connections, and of commands.

    Attributes:
        path: The socket.
        runner: What ``make_runner`` made.

    Raises:
        UserError: It is no name, or an engine with that name runs already.
        KvtopError: The socket or the map cannot be made.
    """

    def __init__(
        self,
        name: str,
        clients: ClientRegistry,
        *,
        make_runner: Callable[[int], EngineRunner] | None = None,
        notes: tuple[str, ...] = (),
        log: Log | None = None,
    ) -> None:
        self._socket = NamedSocket(name)
        self.path = self._socket.path
        complain = (log or Log()).complain
        try:
            self.runner = None if make_runner is None else make_runner(self._socket.create_map())
            # With room to spare, so that one program too many is told so.
            self._server = EngineServer(
                self.runner,
                clients=clients,
                engine=name,
                notes=notes,
                max_connections=MAX_CLIENTS + MAX_CONNECTIONS,
                first_word_s=FIRST_WORD_S,
                audit=AuditLog(audit_path(), complain),
                complain=complain,
            )
            self._socket.start(self._server.serve, complain)
        except BaseException:
            self._socket.close()
            raise

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
