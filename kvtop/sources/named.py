"""NamedEngine: a way to an engine that was published by name on this machine. Looks and asks; never ends the engine."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

from allocator.block_map import process_start_ticks
from kvtop.errors import KvtopError, SourceError
from kvtop.local_socket import connect, map_path, open_map, socket_path
from kvtop.wire import Client

_HELLO_S: Final = 5.0


class NamedEngine:
    """Connections to one published engine, and its block map. An ``EngineLink``.

    Args:
        name: The engine's name.
        path: Its socket; by default where the name says.

    Attributes:
        name: The engine's name.
        pid: Its process.
        missing: What it says that it does not offer, with the reason.
        observing: The connection for observations.

    Raises:
        UserError: It is no name.
        SourceError: No engine of that name can be reached, or it speaks another protocol.
    """

    def __init__(self, name: str, path: Path | None = None) -> None:
        self._path = socket_path(name) if path is None else path
        self.name = name
        self._lock = threading.Lock()
        self._map_fd: int | None = None
        self._commanding: Client | None = None
        self._is_closed = False
        self._greet()

    @property
    def commanding(self) -> Client:
        """A connection of its own for commands, so that a long one does not hold up observations.

        Made when first used: who only looks needs none, and the engine ends one on which nothing is asked.

        Raises:
            SourceError: The engine cannot be reached, or the link is closed.
        """
        with self._lock:
            if self._is_closed:
                raise SourceError("the engine was closed")
            if self._commanding is None:
                self._commanding = Client(connect(self._path))
            return self._commanding

    @property
    def map_fd(self) -> int:
        """Its block map, opened for reading.

        Raises:
            SourceError: There is none, it is not this user's alone, or the link is closed.
        """
        with self._lock:
            if self._is_closed:
                raise SourceError("the engine was closed")
            if self._map_fd is None:
                self._map_fd = open_map(map_path(self._path))
            return self._map_fd

    def loss(self) -> str | None:
        """Return why the engine is gone; ``None`` while it lives."""
        if self._is_closed:
            return "the engine was closed"
        ticks = process_start_ticks(self.pid)
        if ticks is None or ticks != self._start_ticks:
            return f"the engine {self.name} (pid {self.pid}) has ended"
        with contextlib.suppress(SourceError):
            connect(self._path).close()
            return None
        return f"the engine {self.name} (pid {self.pid}) is no longer published"

    def renew(self) -> bool:
        """Attach anew to whoever listens by the name now, the connection being lost; return whether somebody does."""
        if self._is_closed:
            return False
        old = self.observing
        try:
            self._greet()
        except KvtopError:
            return False
        with self._lock:
            commanding, self._commanding = self._commanding, None
            fd, self._map_fd = self._map_fd, None
        _let_go(old, commanding, fd)
        return True

    def _greet(self) -> None:
        observing = Client(connect(self._path))
        try:
            hello = observing.hello(_HELLO_S)
        except BaseException:
            observing.close()
            raise
        self.observing, self.pid, self.missing = observing, hello.pid, hello.missing
        self._start_ticks = process_start_ticks(hello.pid)

    def close(self) -> None:
        """Let go of the engine, which goes on. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            fd, self._map_fd = self._map_fd, None
            commanding = self._commanding
        _let_go(self.observing, commanding, fd)


def _let_go(observing: Client, commanding: Client | None, map_fd: int | None) -> None:
    observing.close()
    if commanding is not None:
        commanding.close()
    if map_fd is not None:
        os.close(map_fd)
