"""EngineProcess: the embedded engine in a child process. Parent and child side; owns the child and its pipes.

The child is told its options on standard input, and the end of its standard input is the end of the child:
whatever way the console dies, the system closes the pipe. It runs in a process group of its own, so the terminal's
signals do not reach it. Its standard output and error go to a pipe whose last lines explain a crash.
Nothing lies on disk unless the engine is published: the block map is an anonymous file, the sockets have no names.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from allocator.block_map import BlockMapWriter
from allocator.errors import ConfigError
from kvtop.audit import AuditLog, audit_path
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import EXIT_FAILED, KvtopError, SourceError, UserError
from kvtop.local_socket import map_path, open_map, socket_path
from kvtop.recording.writer import RecordOrder, record_engine
from kvtop.runner import EngineRunner
from kvtop.server import EngineServer, PublishedEngine
from kvtop.stepped_engine import SteppedEngine
from kvtop.wire import Client, Hello, StartFailed, WireTimeout, server_connection

#: Seconds the child has to end by itself when asked, and after the next, ruder signal.
_END_S: Final = 2.0
#: Seconds the child gives itself to end in good order when its console is gone.
_CHILD_END_S: Final = 1.0
#: Characters of the child's output that are kept, lines and in all.
_KEPT_LINES: Final = 20
_LINE_BYTES: Final = 500
_PR_SET_PDEATHSIG: Final = 1
#: Seconds the child waits for its own console to take a reply: it may lie suspended, which hurts nobody.
_CONSOLE_PATIENCE_S: Final = 86400.0
_CHILD_COMMAND: Final = (sys.executable, "-P", "-m", "kvtop.engine_process")


class StartOrder(msgspec.Struct, frozen=True):
    """What the child is told: the engine, and how to run it.

    Attributes:
        options: The engine, and its speed.
        paused: Start paused.
        max_steps: Steps after which the run is done; ``None`` is no limit.
        publish: The name by which programs may attach.
        record: The recording to write.
    """

    options: EngineOptions
    paused: bool = False
    max_steps: int | None = None
    publish: str | None = None
    record: RecordOrder | None = None


# ---- the parent's side


class EngineProcess:
    """One engine child, as the parent sees it.

    Attributes:
        pid: The child's process id.
        observing, commanding: Two connections, so that a long command does not hold up observations.
    """

    @classmethod
    def start(
        cls,
        options: EngineOptions,
        *,
        paused: bool = False,
        max_steps: int | None = None,
        publish: str | None = None,
        record: RecordOrder | None = None,
        command: Sequence[str] | None = None,
    ) -> EngineProcess:
        """Start the child and return at once; ``wait_ready`` says how that went.

        Args:
            options: The engine, and its speed.
            paused: Start paused.
            max_steps: Steps after which the run is done; ``None`` is no limit.
            publish: The name by which programs may attach.
            record: The recording to write.
            command: The program and its first arguments; by default this module in this interpreter.

        Raises:
            KvtopError: The process cannot be started.
        """
        return cls(StartOrder(options, paused, max_steps, publish, record), command or _CHILD_COMMAND)

    def __init__(self, order: StartOrder, command: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._publish = order.publish
        self._named_map_fd: int | None = None
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        self._map_fd = _anonymous_file()
        try:
            for _ in range(2):
                near, far = socket.socketpair()
                ours.append(near)
                theirs.append(far)
            fds = (self._map_fd, *(sock.fileno() for sock in theirs))
            self._process = subprocess.Popen(
                [*command, *map(str, fds), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                env=child_environment(),
                process_group=0,
            )
        except OSError as error:
            for sock in ours:
                sock.close()
            os.close(self._map_fd)
            raise KvtopError(f"the engine process cannot be started: {error}") from None
        finally:
            for sock in theirs:
                sock.close()
        self.pid = self._process.pid
        self.observing, self.commanding = Client(ours[0]), Client(ours[1])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._drain = threading.Thread(target=self._keep_tail, args=(self._process.stdout,), name="kvtop-engine-output")
        self._drain.daemon = True
        self._drain.start()
        with contextlib.suppress(OSError):  # a child that is gone already is told of by wait_ready
            body = msgspec.msgpack.encode(order)
            self._process.stdin.write(len(body).to_bytes(4, "big") + body)
            self._process.stdin.flush()

    def wait_ready(self, timeout_s: float = 60.0) -> Hello:
        """Return the engine's greeting once it is built.

        Raises:
            UserError: It refuses its options; the text names the option.
            KvtopError: It could not be built.
            SourceError: It died on the way, or was not ready in ``timeout_s``.
        """
        try:
            return self.observing.hello(timeout_s)
        except WireTimeout:
            raise SourceError(f"the engine process (pid {self.pid}) is not ready after {timeout_s:g} s") from None
        except SourceError as error:
            raise SourceError(self.loss() or str(error)) from None

    @property
    def map_fd(self) -> int:
        """The block map's descriptor, empty until the child is ready.

        Raises:
            SourceError: The engine was published and its map is gone.
        """
        if self._publish is None:
            return self._map_fd
        if self._named_map_fd is None:  # a published engine has one map, for all who watch
            self._named_map_fd = open_map(map_path(socket_path(self._publish)))
        return self._named_map_fd

    def loss(self) -> str | None:
        """Return how the child ended and its last words, waiting a moment for it; ``None`` while it lives."""
        if self._is_closed:
            return "the engine was closed"
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return None
        self._drain.join(0.5)
        if code < 0:
            text = f"the engine process (pid {self.pid}) was killed by signal {-code} ({_signal_name(-code)})"
        else:
            text = f"the engine process (pid {self.pid}) ended with exit code {code}"
        return f"{text}: {self._tail[-1]}" if self._tail else text

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines the child wrote to standard output and error, oldest first."""
        return tuple(self._tail)

    def close(self) -> None:
        """End the child and wait for it, 2 s for each of: by itself, by SIGTERM, by SIGKILL. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self.observing.close()
            self.commanding.close()
            for end in (None, self._process.terminate, self._process.kill):
                if end is not None:
                    end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
                    break
            self._drain.join(1.0)
            self._process.stdout.close()
            os.close(self._map_fd)
            if self._named_map_fd is not None:
                os.close(self._named_map_fd)

    def _keep_tail(self, stream: IO[bytes]) -> None:
        """Keep the child's last lines. Ends with the child, which holds the only other end of the pipe."""
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(_LINE_BYTES):
                text = line.decode(errors="replace").strip()
                if text:
                    self._tail.append(text)


def _anonymous_file() -> int:
    """Return a descriptor of an empty file without a name, to be shared with the child."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile(prefix="kvtop-map-") as file:
            return os.dup(file.fileno())
    fd = os.memfd_create("kvtop-block-map", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Never made shorter: reading a mapping beyond a file's end would be a fatal signal.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def child_environment() -> dict[str, str]:
    """Return an environment in which the child finds this very package, and nothing by accident of the directory."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + others if others else "")
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# ---- the child's side


class _Lifeline:
    """Ends the child when its console is gone, in good order once ``stop_with`` was called."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        self._runner: EngineRunner | None = None

    def watch(self) -> None:
        """Watch for the end of standard input, in a thread that lives as long as the process."""
        threading.Thread(target=self._wait, name="kvtop-lifeline", daemon=True).start()

    def stop_with(self, stop: threading.Event, runner: EngineRunner) -> None:
        """From here on, set ``stop`` and wake ``runner`` instead of ending at once."""
        self._runner, self._stop = runner, stop

    def cut(self) -> None:
        """End the process: in good order if that works within a second, else at once."""
        stop, runner = self._stop, self._runner
        if stop is None or runner is None:
            os._exit(EXIT_FAILED)
        stop.set()
        runner.wake()
        deadline = threading.Timer(_CHILD_END_S, os._exit, (EXIT_FAILED,))
        deadline.daemon = True
        deadline.start()

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        self.cut()


def main(arguments: Sequence[str]) -> int:
    """Run the child, its order on standard input, and return the exit code.

    Args:
        arguments: ``MAP_FD OBSERVE_FD COMMAND_FD PARENT_PID``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    map_fd, observe_fd, command_fd, parent_pid = map(int, arguments)
    _die_with_parent(parent_pid)
    order = msgspec.msgpack.decode(_read_frame(0), type=StartOrder)
    lifeline = _Lifeline()
    lifeline.watch()
    socks = [socket.socket(fileno=fd) for fd in (observe_fd, command_fd)]
    published: PublishedEngine | None = None
    try:
        engine, notes = build_engine(order.options)
        if order.record is not None:
            engine = record_engine(engine, order.options, order.record, attached=order.publish is not None)
        make_runner = partial(_make_runner, engine, notes, order)
        if order.publish is None:
            runner = make_runner(map_fd)
        else:
            published = PublishedEngine(order.publish, engine.clients, make_runner=make_runner, notes=notes)
            assert published.runner is not None
            runner = published.runner
    except (KvtopError, ConfigError) as error:
        exit_code = error.exit_code if isinstance(error, KvtopError) else UserError.exit_code
        return _refuse(socks, StartFailed(str(error), exit_code))
    except Exception as error:
        text = str(error) or "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        return _refuse(socks, StartFailed(f"the engine could not be built: {text}", EXIT_FAILED))
    try:
        serve(engine, notes, runner, socks, lifeline)
    finally:
        if published is not None:
            published.close()
        engine.close()
    return 0


def _make_runner(engine: Any, notes: tuple[str, ...], order: StartOrder, map_fd: int) -> EngineRunner:
    """Return the engine's runner, claimed by this thread, around the empty file of its block map."""
    runner_engine: SteppedEngine = engine
    first = engine.snapshot(phase="running", speed=order.options.speed, steps_per_s=None)
    block_map = BlockMapWriter(
        map_fd,
        engine=first.source,
        block_size=first.block_size,
        block_bytes=first.block_bytes,
        slab_size=first.slab_size,
    )
    runner = EngineRunner(
        runner_engine,
        speed=order.options.speed,
        paused=order.paused,
        max_steps=order.max_steps,
        notes=notes,
        block_map=block_map,
        on_turn=block_map.heartbeat,
    )
    runner.claim()
    return runner


def serve(
    engine: Any,
    notes: tuple[str, ...],
    runner: EngineRunner,
    socks: Sequence[socket.socket],
    lifeline: _Lifeline,
) -> None:
    """Run ``engine`` in this thread and answer on ``socks``, until the lifeline is cut."""
    stop = threading.Event()
    lifeline.stop_with(stop, runner)
    name = engine.snapshot(phase="running", speed=None, steps_per_s=None).source
    server = EngineServer(
        runner,
        engine=name,
        notes=notes,
        on_disconnect=lifeline.cut,
        send_timeout_s=_CONSOLE_PATIENCE_S,
        audit=AuditLog(audit_path()),
    )
    for sock in socks:
        server.serve(sock)
    try:
        runner.run(stop)
    finally:
        runner.retire()
        server.close()


def _refuse(socks: Sequence[socket.socket], message: StartFailed) -> int:
    for sock in socks:
        connection = server_connection(sock)
        with contextlib.suppress(SourceError):
            connection.send(message)
        connection.close()
    return message.exit_code


def _read_frame(fd: int) -> bytes:
    """Read one length-prefixed message, byte for byte: what follows on ``fd`` is the lifeline's."""
    size = int.from_bytes(_read_exactly(fd, 4), "big")
    return _read_exactly(fd, size)


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(fd, count - len(data))
        if not chunk:
            raise SystemExit(EXIT_FAILED)  # the console died before it had said what to run
        data += chunk
    return data


def _die_with_parent(parent_pid: int) -> None:
    """End with the parent even if another process still holds the other end of standard input (Linux only).

    The system sends its signal when the *thread* that started this process ends, hence the look at who the parent is.
    """
    if not sys.platform.startswith("linux"):
        return

    def look(*_: object) -> None:
        if os.getppid() != parent_pid:
            os._exit(EXIT_FAILED)

    signal.signal(signal.SIGUSR1, look)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
    look()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
