"""Engines by name on this machine: where a name's socket lies, and the listening end. Owns the socket's file.

The directory is the user's own and nobody else may enter it. A socket file whose engine is gone answers no
connection, and whoever wants the name takes its place.
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
    """A listening socket with a name, until ``close``.

    Args:
        name: The engine's name.
        serve: Called with each connection, in the socket's thread; a ``SourceError`` turns the connection away.

    Raises:
        UserError: It is no name, or an engine with that name runs already.
        KvtopError: The socket cannot be made.
    """

    def __init__(self, name: str, serve: Callable[[socket.socket], None]) -> None:
        try:
            self.path = socket_path(name)
        except UserError as error:
            raise UserError(f"--publish {error}") from None
        self._serve = serve
        self._is_closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listen(name)
        except OSError as error:
            self._listener.close()
            raise KvtopError(f"--publish {name}: {self.path}: {error.strerror or error}") from None
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept_all, name="kvtop-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket's file; connections that are open stay so. Safe to call twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(SourceError):
            connect(self.path, _LOOK_S).close()  # wakes the thread
        self._thread.join(2 * _LOOK_S)
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()

    def _listen(self, name: str) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = os.stat(self.path.parent)
        if own.st_uid != os.getuid() or stat.S_IMODE(own.st_mode) & 0o077:
            raise KvtopError(f"--publish {name}: {self.path.parent} must be this user's alone (mode 700)")
        with self._alone():
            try:
                other = connect(self.path)
            except NobodyListens:
                with contextlib.suppress(FileNotFoundError):
                    self.path.unlink()
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
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(f"--publish {self.path.stem}: another engine is taking that name") from None
        finally:
            os.close(fd)

    def _accept_all(self) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._is_closed.wait(_LOOK_S):  # closed; or out of descriptors, which may pass
                    return
                continue
            uid = peer(sock)[1]
            if self._is_closed.is_set() or uid not in (None, os.getuid()):
                sock.close()
                continue
            with contextlib.suppress(SourceError):
                self._serve(sock)
