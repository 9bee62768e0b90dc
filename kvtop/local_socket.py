"""Engines by name on this machine: where a name's socket and map lie, and the listening end. Owns both files.

The directory is the user's own and nobody else may enter it. A socket file whose engine is gone answers no
connection: whoever wants the name takes its place and clears away what the dead engine left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtop.errors import KvtopError, SourceError, UserError

#: Seconds between looks at whether the socket was closed.
_LOOK_S: Final = 0.5
_CONNECT_S: Final = 2.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class NobodyListens(SourceError):
    """No engine has this name: there is no socket, or whoever listened is gone."""


def runtime_dir() -> Path:
    """Return the directory of this user's sockets, which need not exist yet."""
    import platformdirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of machines without a session's own directory, and falls back
        return Path(platformdirs.user_runtime_dir("kvtop", appauthor=False))


def socket_path(name: str) -> Path:
    """Return where the engine called ``name`` listens.

    Raises:
        UserError: It is no name.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name}: an engine's name is 1 to 40 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return runtime_dir() / f"{name}.sock"


def map_path(socket: Path) -> Path:
    """Return where the block map of the engine that listens at ``socket`` lies."""
    return socket.with_suffix(".map")


def open_map(path: Path) -> int:
    """Open an engine's block map for reading and return its descriptor.

    Raises:
        SourceError: There is none, or it is not a plain file that this user alone may touch.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        os.close(fd)
        raise SourceError(f"{path}: not a plain file of this user alone (mode 600)")
    return fd


@dataclass(frozen=True, slots=True)
class Listener:
    """An engine that listens by name.

    Attributes:
        name: Its name.
        pid: Its process; ``None`` where the system does not say.
    """

    name: str
    pid: int | None

    def __str__(self) -> str:
        return self.name if self.pid is None else f"{self.name} (pid {self.pid})"


def listeners() -> tuple[Listener, ...]:
    """Return the engines that listen on this machine, by name. What dead ones left is passed over."""
    found = []
    for path in sorted(runtime_dir().glob("*.sock")):
        with contextlib.suppress(SourceError):
            sock = connect(path, _LOOK_S)
            found.append(Listener(path.stem, peer(sock)[0]))
            sock.close()
    return tuple(found)


def connect(path: Path, timeout_s: float = _CONNECT_S) -> socket.socket:
    """Return a connection to the engine that listens at ``path``.

    Raises:
        NobodyListens: Nobody does.
        SourceError: It cannot be reached, for another reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
    except (OSError, ValueError) as error:
        sock.close()
        if isinstance(error, FileNotFoundError):
            raise NobodyListens(f"{path}: no engine listens there; kvtop run --publish NAME starts one") from None
        if isinstance(error, ConnectionRefusedError):
            raise NobodyListens(f"{path}: the engine that listened there is gone") from None
        raise SourceError(f"{path}: {error}") from None
    return sock


def peer(sock: socket.socket) -> tuple[int | None, int | None]:
    """Return the process and the user at the other end of a local socket; ``None`` where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None, None
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return pid or None, uid


class NamedSocket:
    """A listening socket with a name, until ``close``. Connections wait until ``start``.

    Args:
        name: The engine's name.
        serve: As for ``start``, which is then called at once.

    Raises:
        UserError: It is no name, or an engine with that name runs already.
        KvtopError: The socket cannot be made.
    """

    def __init__(self, name: str, serve: Callable[[socket.socket], None] | None = None) -> None:
        try:
            self.path = socket_path(name)
        except UserError as error:
            raise UserError(f"--publish {error}") from None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._map_fd: int | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listen(name)
        except OSError as error:
            self._listener.close()
            raise KvtopError(f"--publish {name}: {self.path}: {error.strerror or error}") from None
        except BaseException:
            self._listener.close()
            raise
        if serve is not None:
            self.start(serve)

    def start(
        self, serve: Callable[[socket.socket], None], turned_away: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Hand connections on from here on.

        Args:
            serve: Called with each connection, in the socket's thread; a ``SourceError`` turns the connection away.
            turned_away: Told why each time that one was.
        """
        self._thread = threading.Thread(
            target=self._accept_all, args=(serve, turned_away), name="kvtop-listen", daemon=True
        )
        self._thread.start()

    def create_map(self) -> int:
        """Create the empty file of the engine's block map and return its descriptor, which stays this object's.

        Raises:
            KvtopError: It cannot be made.
        """
        path = map_path(self.path)
        try:
            self._map_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise KvtopError(f"--publish {self.path.stem}: {path}: {error.strerror}") from None
        return self._map_fd

    def close(self) -> None:
        """Stop listening and remove the files; connections that are open stay so. Safe to call twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._thread is not None:
            with contextlib.suppress(SourceError):
                connect(self.path, _LOOK_S).close()  # wakes the thread
            self._thread.join(2 * _LOOK_S)
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                if self._map_fd is not None:
                    map_path(self.path).unlink(missing_ok=True)
                self.path.unlink()
        if self._map_fd is not None:
            os.close(self._map_fd)

    def _listen(self, name: str) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = os.lstat(self.path.parent)
        if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.getuid() or stat.S_IMODE(own.st_mode) & 0o077:
            raise KvtopError(f"--publish {name}: {self.path.parent} must be this user's alone (mode 700)")
        with self._alone():
            try:
                other = connect(self.path)
            except NobodyListens:
                for left in (self.path, map_path(self.path)):
                    left.unlink(missing_ok=True)
            except SourceError as error:
                raise UserError(f"--publish {name}: the name is taken: {error}") from None
            else:
                pid = peer(other)[0]
                other.close()
                whose = "" if pid is None else f" (pid {pid})"
                raise UserError(f"--publish {name}: an engine of that name runs already{whose}")
            self._listener.bind(str(self.path))
            os.chmod(self.path, 0o600)
            self._inode = os.stat(self.path).st_ino
            self._listener.listen()
            self._listener.settimeout(_LOOK_S)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else look for a stale socket meanwhile: two could both find it and both take its place."""
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(f"--publish {self.path.stem}: another engine is taking that name") from None
        finally:
            os.close(fd)

    def _accept_all(self, serve: Callable[[socket.socket], None], turned_away: Callable[[str], None]) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._is_closed.is_set():
                    return
                turned_away(f"no connection can be taken: {error.strerror}")
                self._is_closed.wait(_LOOK_S)  # out of descriptors, say, which may pass
                continue
            pid, uid = peer(sock)
            if self._is_closed.is_set():
                sock.close()
            elif uid not in (None, os.getuid()):
                sock.close()
                turned_away(f"user {uid} (pid {pid}) may not connect to an engine of user {os.getuid()}")
            else:
                try:
                    serve(sock)
                except SourceError as error:
                    turned_away(f"pid {pid}: {error}")
